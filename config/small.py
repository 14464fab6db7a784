# A text of about 100 MB on one GPU: 24.8M parameters without embeddings, 31.1M with 8,192 ids.
#   python prepare.py --input mine.txt --out data/mine && python train.py config/small.py
# 16 slots of 32 sequences x 512 tokens = 262,144 tokens a step,
# 8,960 steps = 2.35B tokens, 95 per parameter (as in the paper). All of the text is read, about 100
# times if it is 100 MB.
data_dir = "data/mine"
out_dir = "out/small"
n_layer = 12
n_head = 6
n_embd = 384
n_ff = 1280
vocab_size = 0
seq_len = 512
repetitions = 0
batch_size = 512
micro_batch_size = 32
max_steps = 8960
eval_tokens = 1048576
save_interval = 1024
log_interval = 16
