"""envforge: from host facts and a request to a fine-tuning environment that is proven to chat and to train."""

__version__ = "0.1.0"
