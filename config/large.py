# A text of 1 GB or more on 8 GPUs: the paper's model, 363M parameters without embeddings.
#   python prepare.py --input mine.txt --out data/mine
#   torchrun --nproc_per_node=8 train.py config/large.py
# 256 slots of 8 sequences x 2,048 tokens = 4,194,304 tokens a step,
# 8,192 steps = 34.4B tokens, 95 per parameter. All of the text is read, about 180 times if it is
# 1 GB, 18 times if it is 10 GB.
data_dir = "data/mine"
out_dir = "out/large"
vocab_size = 0
repetitions = 0
