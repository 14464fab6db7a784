# The paper's best model at 1 repetition, and its advice for up to 16: AR with a little MD.
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences,
# 252 AR and 4 MD.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 1 = 34.4B are unique.
# Average normalized score in the paper: 26.9 AR (Table 2), 27.9 prefix (Table 10).
# The paper used AR weight 2 (--ar_weight=2 does the same); not run by us.
out_dir = "out/rep1_a63_64"
alpha = "63/64"
