# nanoGPT's first example on a CPU, with both objectives: its model size, its 12 x 64 tokens a
# step, its 2,000 steps, and its split of tinyshakespeare (the last 10% is held out), with bytes as
# tokens.
#   python prepare.py --input input.txt --out data/shakespeare --vocab_size 272
#   python train.py config/shakespeare.py
# 2 slots of 6 sequences x 64 tokens = 768 tokens a step, 2,000 steps = 1.5M tokens, or 1.5
# times the text. About 5 minutes on one core.
data_dir = "data/shakespeare"
out_dir = "out/shakespeare"
n_layer = 4
n_head = 4
n_embd = 128
n_ff = 344  # as many parameters as nanoGPT's 512 without a gate
vocab_size = 0
seq_len = 64
alpha = "1/2"
repetitions = 0
batch_size = 12
micro_batch_size = 6
max_steps = 2000
eval_interval = 500
eval_tokens = 131072
save_interval = 500
log_interval = 100
compile = False
