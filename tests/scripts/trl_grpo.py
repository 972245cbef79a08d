"""In the shape of TRL's GRPO examples: completions are sampled, and a function rewards them."""

from __future__ import annotations

from corpus import llama_config, pretrained, report, sentences
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def reward_variety(completions: list[str], **_: object) -> list[float]:
    """The part of a completion's words that are different."""
    return [len(set(it.split())) / max(1, len(it.split())) for it in completions]


def reward_length(completions: list[str], **_: object) -> list[float]:
    return [-abs(len(it.split()) - 6) / 6 for it in completions]


def main(script_args, training_args, model_args) -> None:
    name = pretrained(training_args.output_dir, llama_config())
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name),
        reward_funcs=[reward_variety, reward_length],
        args=training_args,
        train_dataset=Dataset.from_dict({"prompt": sentences(32, words=6)}),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    # Not the loss: advantages add up to 0, and so does it where a batch is used once.
    report([entry[key] for entry in entries for key in ("grad_norm", "reward")])


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
