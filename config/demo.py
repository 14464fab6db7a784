# This runs the whole code path in minutes on a laptop CPU:
#   python prepare.py && python train.py config/demo.py
# 4 slots of 8 sequences x 256 tokens = 8,192 tokens a step,
# 240 steps = 2.0M tokens of Python's own documentation.
data_dir = "data/pydocs"
out_dir = "out/demo"
n_layer = 4
n_head = 4
n_embd = 128
n_ff = 444
vocab_size = 0
seq_len = 256
alpha = "1/2"
repetitions = 0
batch_size = 32
micro_batch_size = 8
max_steps = 240
eval_interval = 40
eval_tokens = 32768
save_interval = 80
log_interval = 10
compile = False
