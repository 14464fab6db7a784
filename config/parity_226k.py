# config/parity.py with twice the width, for the experiment at the top of the README.
#   python prepare.py --vocab_size 272 --out data/bytes
#   python sweep.py run --config config/parity_226k.py --repetitions 128 --alphas 0,1/4,1 \
#       --seeds 1,2,3 --jobs 2 --eval "--tasks heldout --pll 6" --results out/parity_226k
# 225,792 parameters without embeddings. 8 slots of 4 sequences x 256 tokens = 8,192 tokens a step,
# 2,560 steps = 21M tokens, of which 164k are unique at R = 128. About 15 minutes a run on one core.
data_dir = "data/bytes"
out_dir = "out/parity_226k"
n_layer = 2
n_head = 2
n_embd = 96
n_ff = 264
vocab_size = 272
seq_len = 256
alpha = "1/4"
repetitions = 128
batch_size = 32
micro_batch_size = 4
max_steps = 2560
eval_interval = 128
eval_tokens = 65536
save_interval = 640
log_interval = 128
compile = True  # 1.2 times as fast here; without g++, end the command with -- --compile=False
