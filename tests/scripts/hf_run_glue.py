"""In the shape of transformers' `run_glue.py`: pairs of sentences, a classifier, predictions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from corpus import WORDS, make_tokenizer, report, sentences
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class DataTrainingArguments:
    max_seq_length: int = field(default=32)
    pad_to_max_length: bool = field(default=False)


def pairs() -> Dataset:
    """A sentence and itself, or another one; the label says which."""
    texts = sentences(96, words=5)
    others = [texts[i] if i % 2 == 0 else texts[-i] for i in range(96)]
    labels = [int(a == b) for a, b in zip(texts, others, strict=True)]
    return Dataset.from_dict({"sentence1": texts, "sentence2": others, "label": labels})


def main() -> None:
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = make_tokenizer()
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            num_labels=2,
        )
    )
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess(examples: dict) -> dict:
        return tokenizer(
            examples["sentence1"], examples["sentence2"],
            padding=padding, max_length=data_args.max_seq_length, truncation=True,
        )  # fmt: skip

    with training_args.main_process_first(desc="dataset map pre-processing"):
        data = pairs().map(preprocess, batched=True, load_from_cache_file=False)
    split = data.train_test_split(test_size=24, seed=1)

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        return {"accuracy": float((np.argmax(preds, axis=1) == p.label_ids).mean())}

    collator = None if padding else DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=collator,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate(eval_dataset=split["test"])
    predictions = trainer.predict(
        split["test"].remove_columns("label"), metric_key_prefix="predict"
    )
    labels = np.argmax(predictions.predictions, axis=1)
    if not torch.isfinite(torch.tensor(predictions.predictions)).all():
        raise SystemExit("predictions are not finite")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    best = trainer.state.best_model_checkpoint
    report(losses, eval=metrics, predicted=len(labels), best=best)


if __name__ == "__main__":
    main()
