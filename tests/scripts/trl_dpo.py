"""In the shape of TRL's `dpo.py`: a policy, a reference model (or LoRA's base), preferences."""

from __future__ import annotations

from corpus import llama_config, pretrained, report, sentences
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config


def preferences(count: int) -> Dataset:
    texts = sentences(3 * count, words=5)
    prompt, chosen, rejected = (texts[i::3] for i in range(3))
    return Dataset.from_dict({"prompt": prompt, "chosen": chosen, "rejected": rejected})


def main(script_args, training_args, model_args) -> None:
    name = pretrained(training_args.output_dir, llama_config())
    model = AutoModelForCausalLM.from_pretrained(name)
    peft_config = get_peft_config(model_args)
    ref_model = AutoModelForCausalLM.from_pretrained(name) if peft_config is None else None
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = preferences(32)
    trainer = DPOTrainer(
        model,
        ref_model,
        args=training_args,
        train_dataset=rows.select(range(24)),
        eval_dataset=rows.select(range(24, 32)),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(training_args.output_dir)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(losses, eval=metrics)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
