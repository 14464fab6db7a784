# The paper's autoregressive baseline at 128 repetitions, which overfits (Figure 1).
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences, all AR.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 128 = 268M are unique.
# Average normalized score in the paper: 9.4 AR (Table 2).
# The paper used AR weight 2 (no effect here); not run by us.
out_dir = "out/rep128_a1"
alpha = "1"
repetitions = 128
