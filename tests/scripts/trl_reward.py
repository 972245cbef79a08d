"""In the shape of TRL's `reward_modeling.py`: a classifier of one label over pairs."""

from __future__ import annotations

from corpus import llama_config, pretrained, report, sentences
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser


def main(script_args, training_args, model_args) -> None:
    name = pretrained(training_args.output_dir, llama_config())
    # Not from a config: at stage 3 DeepSpeed 0.19.8 shards the inner model, then transformers
    # initializes it once more with no weight gathered (IndexError: index 0 is out of bounds for
    # dimension 0 with size 0, of the padding token's row).
    set_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
    texts = sentences(64, words=6)
    rows = Dataset.from_dict({"chosen": texts[:32], "rejected": texts[32:]})
    trainer = RewardTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(name),
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
