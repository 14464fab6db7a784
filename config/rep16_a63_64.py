# The paper's advice at 16 repetitions, the most that it covers: AR with a little MD.
# A step is 2,048 sequences x 2,048 tokens = 4,194,304 tokens = 256 slots of 8 sequences,
# 252 AR and 4 MD.
# The run is 8,192 steps = 34.4B tokens, of which 34.4B / 16 = 2.15B are unique.
# Average normalized score in the paper: not in any table, only as a color in Figure 4.
# The paper used AR weight 2 (--ar_weight=2 does the same); not run by us.
out_dir = "out/rep16_a63_64"
alpha = "63/64"
repetitions = 16
