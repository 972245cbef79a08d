"""In the shape of TRL's `sft.py`: TrlParser, a model by name, LoRA by flag."""

from __future__ import annotations

from corpus import llama_config, pretrained, report, sentences
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main(script_args, training_args, model_args) -> None:
    if model_args.model_name_or_path is None:
        model_args.model_name_or_path = pretrained(training_args.output_dir, llama_config())
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, attn_implementation=model_args.attn_implementation
    )
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, use_fast=True)
    texts = sentences(48)
    rows = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=rows.select(range(40)),
        eval_dataset=rows.select(range(40, 48)),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    report(losses, eval=trainer.evaluate(), trained=trained)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    main(*parser.parse_args_and_config())
