#!/usr/bin/env bash
# The runs of NOTES.md, section 7: the BabyLM path with a small model. They need mix_train.jsonl.gz
# and mix_val.jsonl.gz, as assets/pieces.sh does, and BLiMP (python prepare.py --tasks).
set -eu
python - << 'PYTHON'
import gzip, json
for source, ending in ("mix_train", "train"), ("mix_val", "dev"):
    texts = [json.loads(line)["text"] for line in gzip.open(f"{source}.jsonl.gz", "rt")]
    for i in range(0, len(texts), 3017):
        open(f"part{i // 3017 + 1}.{ending}", "w").write("\n\n".join(texts[i : i + 3017]) + "\n")
PYTHON
python prepare.py --input '*.train' --val '*.dev' --out data/walk --vocab_size 1024
for ALPHA in 1 1/2 0; do
  RUN=out/walk/a${ALPHA/\//_}
  python train.py config/demo.py --data_dir=data/walk --out_dir=$RUN --alpha=$ALPHA --repetitions=32 --max_steps=800 \
      --milestones=25,50,100,200,400,600,800 --eval_interval=100 --eval_tokens=131072 --resume
  for STEP in 25 50 100 200 400 600 800; do
    python eval.py --ckpt $RUN/ckpt_$STEP.pt --tasks blimp --limit 50 --modes ar,pll --pll 1 --json $RUN/eval_$STEP.json
    rm -rf hf/$RUN/step_$STEP
    python export.py --ckpt $RUN/ckpt_$STEP.pt --out hf/$RUN/step_$STEP
  done
done
for FILE in out/walk/*/eval_*.json; do python -m json.tool --compact $FILE; done > assets/walk.jsonl
python sweep.py collect --results out/walk > assets/walk_losses.jsonl
python assets/walk.py
