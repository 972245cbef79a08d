"""In the shape of TRL's online DPO examples: a function rates pairs of sampled completions."""

from __future__ import annotations

from corpus import llama_config, pretrained, report, sentences
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, TrlParser
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer


def reward_variety(completions: list[str], **_: object) -> list[float]:
    """The part of a completion's words that are different."""
    return [len(set(it.split())) / max(1, len(it.split())) for it in completions]


def main(script_args, training_args, model_args) -> None:
    name = pretrained(training_args.output_dir, llama_config())
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    trainer = OnlineDPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(name),
        ref_model=AutoModelForCausalLM.from_pretrained(name),
        reward_funcs=reward_variety,
        args=training_args,
        train_dataset=Dataset.from_dict({"prompt": sentences(32, words=6)}),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    report([entry[key] for entry in entries for key in ("loss", "grad_norm")])


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, OnlineDPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
