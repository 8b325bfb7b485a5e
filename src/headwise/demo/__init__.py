"""Trained models to look at: a small one that ships with the package, and MiniLM, which is fetched once.

The small one needs no network and no transformers; ``headwise.demo.minilm`` needs both.
"""

from headwise.demo.model import DemoModel as DemoModel
from headwise.demo.model import encode as encode
from headwise.demo.model import load as load
from headwise.demo.model import pieces as pieces
