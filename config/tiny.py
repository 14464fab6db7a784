# The paper's Figure 1 on a laptop CPU, under 3 minutes a run on one core: little text,
# read 16 times.
#   python sweep.py run --config config/tiny.py --repetitions 16 --alphas 0,1/4,1 \
#       --seeds 1,2,3 --jobs 2
# Final held-out losses, mean of 3 seeds: alpha 1/4 has AR 4.32,
# MD 5.02; 1 has AR 5.59 (best 4.40); 0 has MD 5.10.
# 4 slots of 4 sequences x 256 tokens = 4,096 tokens a step, 384 steps = 1.57M tokens,
# of which 98,304 are unique.
data_dir = "data/pydocs"
out_dir = "out/tiny"
n_layer = 2
n_head = 4
n_embd = 128
n_ff = 352
vocab_size = 1024
seq_len = 256
alpha = "1/4"
repetitions = 16
batch_size = 16
micro_batch_size = 4
max_steps = 384
decay_steps = 96
eval_interval = 32
eval_tokens = 32768
save_interval = 96
log_interval = 16
compile = False
