"""An M3 of any BERT, calibrated on real text and not trained: for measuring exactness and size, not accuracy.

python scripts/untrained.py BERT_FOLDER TEXT_FILE OUT_FOLDER   (writes the checkpoint, its tokenizer and model.sorbet)
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from sorbet import SorbetForSequenceClassification, convert
from sorbet.text import read_table


def main(bert: str, data: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert)
    texts = read_table(data).texts()[:64]
    calibration = dict(tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))
    model = SorbetForSequenceClassification.from_bert(bert, "M3", calibration).eval()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    convert(model, tokenizer, {"data": "none: calibrated, not trained"}).save(Path(out) / "model.sorbet")


if __name__ == "__main__":
    main(*sys.argv[1:])
