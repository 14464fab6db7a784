# config/parity.py with twice the width, for the experiment at the top of the README.
#   python prepare.py --vocab_size 272 --out data/bytes
#   python sweep.py run --config config/parity_226k.py --repetitions 128 --alphas 0,1/4,1 \
#       --seeds 1,2,3 --jobs 2 --eval "--tasks heldout --pll 6"
# 225,792 parameters without embeddings. 8 slots of 4 sequences x 256 tokens = 8,192 tokens a step,
# 2,560 steps = 21M tokens, of which 164k are unique at R = 128. About 15 minutes a run on one core.
from config.parity import *  # noqa: F403

out_dir = "out/parity_226k"
n_embd = 96
n_ff = 264
batch_size = 32
max_steps = 2560
eval_interval = 128
log_interval = 128
save_interval = 640
compile = True  # 1.2 times as fast here; it needs g++
