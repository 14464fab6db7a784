#!/usr/bin/env bash
# The runs of NOTES.md, section 6: one text, cut into documents in three ways. They need
# mix_train.jsonl.gz and mix_val.jsonl.gz (edited English prose, not part of this repository) and
# the tasks (python prepare.py --tasks).
set -eu
python - << 'PYTHON'
import gzip, json
texts = [json.loads(line)["text"] for line in gzip.open("mix_train.jsonl.gz", "rt")]
text = "\n\n".join(texts) + "\n"
for name, size, border in ("line", 1, "\n"), ("1k", 1024, "\n"), ("64k", 65536, "\n\n"):
    with open(f"{name}.jsonl", "w") as file:
        start = 0
        while start < len(text):
            end = text.find(border, start + size - 1)
            end = end + len(border) if end >= 0 else len(text)
            if text[start:end].strip():
                print(json.dumps({"text": text[start:end]}), file=file)
            start = end
PYTHON
python prepare.py --input mix_train.jsonl.gz --val mix_val.jsonl.gz --out data/whole --vocab_size 2048
for NAME in line 1k 64k; do
  python prepare.py --input $NAME.jsonl --val mix_val.jsonl.gz --out data/$NAME --tokenizer data/whole
  python train.py config/demo.py --data_dir=data/$NAME --out_dir=out/$NAME --repetitions=1 --max_steps=1000 \
      --eval_interval=100 --eval_tokens=131072 --resume
  python eval.py --ckpt out/$NAME --tasks blimp --limit 200 --modes ar,pll --pll 1
done
