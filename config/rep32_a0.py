# The paper's masked-diffusion baseline at 32 repetitions.
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences, all MD.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 32 = 1.07B are unique.
# Average normalized score in the paper: 21.4 PLL (Table 11).
# The paper used AR weight 2 (no effect here); not run by us.
out_dir = "out/rep32_a0"
alpha = "0"
repetitions = 32
