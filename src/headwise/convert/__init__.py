"""Conversion: other people's attention as headwise layers and masks.

``textbook`` reads the state dicts of hand-written modules, ``torch`` reads ``nn.MultiheadAttention``,
``huggingface`` plugs headwise into transformers (which is imported when ``register`` is called, not before),
``rotary`` reads the rotary embedding out of a configuration of transformers, ``fused`` puts the projections of a state
dict into one matrix. ``swap`` puts headwise into a model in place, ``unswap`` takes it out.
"""

from headwise.convert import huggingface as huggingface
from headwise.convert import rotary as rotary
from headwise.convert import textbook as textbook
from headwise.convert import torch as torch
from headwise.convert.layouts import fused as fused
from headwise.convert.swap import Report as Report
from headwise.convert.swap import swap as swap
from headwise.convert.swap import unswap as unswap
