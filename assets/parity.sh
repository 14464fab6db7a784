#!/usr/bin/env bash
# The runs of NOTES.md, sections 1 to 3, at the paper's proportions: about ten hours on two cores.
# Ctrl-C stops it, and the same command continues. It ends by writing assets/*.jsonl and, in out/, the
# figures, which need requirements-dev.txt. (Our files lack some of the PLL scores.)
set -eu
python prepare.py --vocab_size 272 --out data/bytes
EVAL="--tasks heldout --pll 6"

# ---- 56k parameters, over R and alpha: 2 minutes a run, and 2 more to score it ----
GRID="--config config/parity.py --jobs 2 --results out/parity"
python sweep.py run $GRID --eval "$EVAL" --repetitions 16,64 --alphas 0,1/8,1/4,1/2,3/4,7/8,15/16,63/64,1
python sweep.py run $GRID --eval "$EVAL" --repetitions 32 --alphas 0,1/8,1/4,1/2,3/4,1
python sweep.py run $GRID --eval "$EVAL" --repetitions 128 --alphas 0,1/8,1/4,1/2,1
python sweep.py run $GRID --eval "$EVAL" --repetitions 4 --alphas 0,1/2,15/16,1
python sweep.py run $GRID --eval "$EVAL" --repetitions 16,64 --alphas 0,1/2,15/16,1 --seeds 2,3
python sweep.py run $GRID --eval "$EVAL" --repetitions 128 --alphas 0,1/4,1 --seeds 2,3
python sweep.py run $GRID --repetitions 64 --alphas 1/4 --seeds 2,3
python sweep.py run $GRID --repetitions 128 --alphas 1/2 --seeds 2,3

# ---- 226k parameters: 15 minutes a run, and 4 to score it ----
LARGE="--config config/parity_226k.py --jobs 2 --results out/parity_226k"
python sweep.py run $LARGE --eval "$EVAL" --repetitions 128 --alphas 0,1/4,1 --seeds 1,2,3
python sweep.py run $LARGE --eval "$EVAL" --repetitions 128 --alphas 1/8,1/2
python sweep.py run $LARGE --eval "$EVAL" --repetitions 16 --alphas 0,15/16,1 --seeds 1,2,3
python sweep.py run $LARGE --eval "$EVAL" --repetitions 16 --alphas 1/2
python sweep.py run $LARGE --eval "$EVAL" --repetitions 64 --alphas 0,1/2,15/16,1

# ---- 14k parameters: half a minute a run, and one to score it ----
SMALL="--config config/parity.py --jobs 2 --results out/parity_14k"
FLAGS="--n_embd=24 --n_ff=66 --batch_size=8 --max_steps=640 --eval_interval=32 --log_interval=32"
python sweep.py run $SMALL --eval "$EVAL" --repetitions 16 --alphas 0,15/16,1 --seeds 1,2,3 -- $FLAGS
python sweep.py run $SMALL --eval "$EVAL" --repetitions 64 --alphas 0,1/2,1 --seeds 1,2,3 -- $FLAGS
python sweep.py run $SMALL --eval "$EVAL" --repetitions 64 --alphas 15/16 -- $FLAGS
python sweep.py run $SMALL --eval "$EVAL" --repetitions 128 --alphas 0,1/4,1 --seeds 1,2,3 -- $FLAGS

# ---- the rivals: other weight decays, and AR alone stopped after R of its repetitions ----
for WD in 0.3 1.0; do
  python sweep.py run --config config/parity.py --repetitions 64 --alphas 1/2,1 --seeds 1,2,3 --jobs 2 \
      --eval "$EVAL" --results out/rivals/wd$WD -- --weight_decay=$WD
done
for RUN in 8_0.1 12_0.1 16_0.1 24_0.1 16_0.3 24_0.3; do
  R=${RUN%_*} WD=${RUN#*_}
  python sweep.py run --config config/parity.py --repetitions $R --alphas 1 --seeds 1,2,3 --jobs 2 \
      --eval "$EVAL" --results out/rivals/stop$RUN -- \
      --max_steps=$((20*R)) --eval_interval=$R --log_interval=$R --weight_decay=$WD
done
for RUN in 8_0.1 12_0.1 16_0.1 24_0.1 8_0.3 12_0.3 16_0.3 24_0.3; do
  R=${RUN%_*} WD=${RUN#*_}
  python sweep.py run --config config/parity_226k.py --repetitions $R --alphas 1 --seeds 1,2,3 --jobs 2 \
      --eval "$EVAL" --results out/rivals/large_stop$RUN -- \
      --max_steps=$((20*R)) --eval_interval=$R --log_interval=$R --weight_decay=$WD
done
LARGE="--config config/parity_226k.py --repetitions 128 --jobs 2 --results out/rivals/large_wd0.3"
python sweep.py run $LARGE --eval "$EVAL" --alphas 1/4,1 --seeds 1,2,3 -- --weight_decay=0.3

# ---- numbers and figures ----
for RUNS in parity parity_226k parity_14k; do
  python sweep.py collect --results out/$RUNS > assets/$RUNS.jsonl
done
for RUNS in out/rivals/*; do python sweep.py collect --results $RUNS; done > assets/rivals.jsonl
python assets/rivals.py
python assets/ladder.py
python sweep.py table --results assets/parity.jsonl --target val_ar,val_ar_best,val_md,acc_ar,acc_pll6
python sweep.py fit --results assets/parity.jsonl --target val_ar,acc_ar,acc_pll6,logp_pll6
python sweep.py plot --results assets/parity.jsonl --target val_ar,acc_pll6 --out out/readme
python sweep.py plot --results assets/parity.jsonl --target acc_ar,val_md,logp_pll6 --out out/notes
# This comes last, because the first plot above also writes out/readme/curves_R128.png.
python sweep.py plot --results assets/parity_226k.jsonl --repetitions 128 --alphas 0,1/4,1 --out out/readme
