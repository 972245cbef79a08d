"""As transformers' `run_clm.py`: arguments as dataclasses, blocks of tokens, Trainer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from corpus import pretrained, report, sentences
from datasets import Dataset, DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None)
    dtype: str | None = field(default=None)


@dataclass
class DataTrainingArguments:
    block_size: int = field(default=16)
    max_train_samples: int = field(default=64)
    max_eval_samples: int = field(default=16)


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logger.warning("rank %s, device %s", training_args.local_rank, training_args.device)
    last_checkpoint = None
    if Path(training_args.output_dir).is_dir():
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)
    if model_args.model_name_or_path is None:
        model_args.model_name_or_path = pretrained(training_args.output_dir)

    raw = DatasetDict(
        train=Dataset.from_dict({"text": sentences(320)[:200]}),
        validation=Dataset.from_dict({"text": sentences(320)[200:]}),
    )
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))

    def group_texts(examples: dict) -> dict:
        joined = {key: list(chain(*examples[key])) for key in examples}
        length = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = {
            key: [ids[i : i + data_args.block_size] for i in range(0, length, data_args.block_size)]
            for key, ids in joined.items()
        }
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw.map(
            lambda examples: tokenizer(examples["text"]), batched=True, remove_columns=["text"]
        )
    with training_args.main_process_first(desc="grouping texts together"):
        lm_datasets = tokenized.map(group_texts, batched=True)
    train = lm_datasets["train"].select(range(data_args.max_train_samples))
    evaluation = lm_datasets["validation"].select(range(data_args.max_eval_samples))

    def preprocess_logits_for_metrics(logits, labels) -> torch.Tensor:
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds) -> dict[str, float]:
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train if training_args.do_train else None,
        eval_dataset=evaluation if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    losses: list[float] = []
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = train_result.metrics
        metrics["train_samples"] = len(train)
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = {}
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    report(losses, eval=metrics, steps=trainer.state.global_step)


if __name__ == "__main__":
    main()
