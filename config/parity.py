# The paper's proportions on a laptop CPU: 93 training tokens per parameter (the paper: 95),
# with bytes as tokens.
#   python prepare.py --vocab_size 272 --out data/bytes
#   python sweep.py run --config config/parity.py --repetitions 16,64 --alphas 0,1/2,15/16,1 \
#       --seeds 1,2,3 --jobs 2 --results out/parity
# 56,448 parameters without embeddings. 4 slots of 4 sequences x 256 tokens = 4,096 tokens a step,
# 1,280 steps = 5.2M tokens, of which 328k are unique at R = 16. About 2 minutes a run on one core.
data_dir = "data/bytes"
out_dir = "out/parity"
n_layer = 2
n_head = 2
n_embd = 48
n_ff = 132
vocab_size = 272
seq_len = 256
alpha = "1/2"
repetitions = 16
batch_size = 16
micro_batch_size = 4
max_steps = 1280
eval_interval = 64
eval_tokens = 65536
save_interval = 320
log_interval = 64
compile = False
