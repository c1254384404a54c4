"""Train the tiny Sorbet that `sorbet quickstart` shows: python scripts/make_tiny_model.py (a minute on one core).

A BERT of two layers learns made-up film remarks, then becomes M1, M2 and M3 step by step, each taught by the one
before (Algorithm 4 in small), and is converted.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification

from sorbet import madeup
from sorbet.conversion import convert
from sorbet.modeling_sorbet import SorbetForSequenceClassification
from sorbet.text import Batch, TextEncoder, pad

POSITIONS = 64


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in vars(batch).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("src/sorbet/models/tiny.sorbet"))
    parser.add_argument("--steps", type=int, default=600, help="of each stage")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    tokenizer = madeup.tokenizer()
    encoder = TextEncoder(tokenizer.to_str(), POSITIONS)
    train, dev = madeup.remarks(8000, seed=1), madeup.remarks(1000, seed=2)

    def batch(remarks: list[madeup.Remark]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return tensors(pad([encoder.ids(r.text) for r in remarks])), torch.tensor([r.label for r in remarks])

    def accuracy(model: torch.nn.Module) -> float:
        inputs, labels = batch(dev)
        with torch.no_grad():
            return float((model.eval()(**inputs).logits.argmax(-1) == labels).float().mean())

    def fit(model: torch.nn.Module, teacher: torch.nn.Module | None, lr: float) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=args.steps, pct_start=0.1)
        for step in range(args.steps):
            start = step * 32 % len(train)
            inputs, labels = batch(train[start : start + 32])
            model.train()
            output = model(**inputs, output_hidden_states=True)
            if teacher is None:
                loss = F.cross_entropy(output.logits, labels)
            else:
                with torch.no_grad():
                    goal = teacher(**inputs, output_hidden_states=True)
                loss = F.kl_div(output.logits.log_softmax(-1), goal.logits.softmax(-1), reduction="batchmean")
                mask = inputs["attention_mask"].unsqueeze(-1)
                for ours, theirs in zip(output.hidden_states[1:], goal.hidden_states[1:], strict=True):
                    loss = loss + ((ours - theirs).square() * mask).sum() / mask.sum() / ours.shape[-1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        print(f"{getattr(model, 'stage', 'teacher')}: accuracy {accuracy(model):.3f}")

    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=POSITIONS, num_labels=2,
        id2label=dict(enumerate(madeup.LABELS)), label2id={name: i for i, name in enumerate(madeup.LABELS)},
    )  # fmt: skip
    teacher: torch.nn.Module = BertForSequenceClassification(config)
    fit(teacher, None, 1e-3)
    calibration = batch(train[:256])[0]
    for stage in ("M1", "M2", "M3"):
        student = SorbetForSequenceClassification.from_bert(teacher, stage, calibration)
        student.stage = stage
        fit(student, teacher.eval(), 2e-3)
        teacher = student
    provenance = {
        "data": "made-up film remarks (sorbet.madeup), 8,000 to train, 1,000 held out",
        "dev_accuracy": round(accuracy(teacher), 4),
        "command": f"python scripts/make_tiny_model.py --steps {args.steps}",
    }
    artifact = convert(teacher, tokenizer, provenance)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    artifact.save(args.out)
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
