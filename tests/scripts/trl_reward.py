"""In the shape of TRL's `reward_modeling.py`: a classifier of one label over pairs."""

from __future__ import annotations

from corpus import llama_config, make_tokenizer, report, sentences
from datasets import Dataset
from transformers import LlamaForSequenceClassification, set_seed
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser


def main(script_args, training_args, model_args) -> None:
    set_seed(0)
    config = llama_config()
    config.num_labels = 1
    texts = sentences(64, words=6)
    rows = Dataset.from_dict({"chosen": texts[:32], "rejected": texts[32:]})
    trainer = RewardTrainer(
        model=LlamaForSequenceClassification(config),
        processing_class=make_tokenizer(),
        args=training_args,
        train_dataset=rows.select(range(24)),
        eval_dataset=rows.select(range(24, 32)),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(losses, eval=trainer.evaluate())


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, RewardConfig, ModelConfig))
    main(*parser.parse_args_and_config())
