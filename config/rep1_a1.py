# The paper's autoregressive baseline at 1 repetition.
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences, all AR.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 1 = 34.4B are unique.
# Average normalized score in the paper: 26.1 AR (Table 2).
# The paper used AR weight 2 (no effect here); not run by us.
out_dir = "out/rep1_a1"
alpha = "1"
