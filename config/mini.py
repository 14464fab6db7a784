# A text of about 10 MB on one GPU: 5.7M parameters without embeddings, 7.8M with 4,096 ids.
#   python prepare.py --input mine.txt --out data/mine && python train.py config/mini.py
# 8 slots of 16 sequences x 512 tokens = 65,536 tokens a step,
# 8,192 steps = 537M tokens, 94 per parameter (the paper: 95). All of the text is read, about 210
# times if it is 10 MB.
data_dir = "data/mine"
out_dir = "out/mini"
n_layer = 6
n_head = 4
n_embd = 256
n_ff = 896
vocab_size = 0
seq_len = 512
repetitions = 0
batch_size = 128
micro_batch_size = 16
max_steps = 8192
eval_tokens = 262144
save_interval = 1024
log_interval = 16
