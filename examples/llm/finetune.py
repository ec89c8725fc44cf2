"""Fine-tunes a model: ``python examples/llm/finetune.py +conf=llm/sft_lora model.init_from=FOLDER [key=value ...]``."""

from nemo_like.core import run

if __name__ == "__main__":
    run.main("pretrain")
