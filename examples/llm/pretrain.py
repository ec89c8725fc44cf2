"""Pre-trains a language model: ``python examples/llm/pretrain.py +conf=llm/quickstart [key=value ...]``."""

from nemo_like.core import run

if __name__ == "__main__":
    run.main("pretrain")
