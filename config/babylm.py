# BabyLM, strict-small (10M words, ten epochs), on one GPU: the shape of GPT-BERT-small as a Llama.
#   python prepare.py --input 'train_10M/*.train' --val 'dev/*.dev' --out data/babylm \
#       --vocab_size 8192
#   python train.py config/babylm.py
# 31M parameters. 8 slots of 16 sequences x 512 tokens = 65,536 tokens a step.
# alpha: "auto" would be 63/64 at 10 repetitions. 15/16 gives MD four times as many sequences, and
# costs no AR loss at 226k parameters and R = 16 (NOTES.md). We have not run it at this size.
import json
import os

data_dir = "data/babylm"
out_dir = "out/babylm"
n_layer = 12
n_head = 6
n_embd = 384
n_ff = 1280
vocab_size = 0
seq_len = 512
alpha = "15/16"
repetitions = 10
max_steps = 0
batch_size = 128
micro_batch_size = 16
eval_interval = 100
eval_tokens = 1048576
save_interval = 100
log_interval = 10

# The challenge asks for checkpoints after 1M, 2M, ... 10M, 20M, ... 100M words (the end).
_meta = os.path.join(data_dir, "meta.json")
if os.path.exists(_meta):
    with open(_meta) as _file:
        _train = json.load(_file)["train"]
    _words_per_step = batch_size * seq_len * _train["words"] / _train["tokens"]
    _words = [m * 10**6 for m in (*range(1, 10), *range(10, 100, 10))]
    milestones = ",".join(str(round(n / _words_per_step)) for n in _words)
