"""Conversion: other people's attention as headwise layers and masks.

``textbook`` reads the state dicts of hand-written modules, ``torch`` reads ``nn.MultiheadAttention``,
``huggingface`` plugs headwise into transformers (which is imported when ``register`` is called, not before).
"""

from headwise.convert import huggingface as huggingface
from headwise.convert import textbook as textbook
from headwise.convert import torch as torch
