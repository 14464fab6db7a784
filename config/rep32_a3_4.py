# The paper's best model at 32 repetitions, of which AR sees 24.
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences,
# 192 AR and 64 MD.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 32 = 1.07B are unique.
# Average normalized score in the paper: 23.9 AR (Table 2), 25.0 prefix (Table 10),
# 25.3 PLL (Table 11).
# The paper used AR weight 2 (--ar_weight=2 does the same); not run by us.
out_dir = "out/rep32_a3_4"
alpha = "3/4"
repetitions = 32
