"""headwise: multi-head attention for PyTorch, with masks as values and heads you can see."""

from headwise import convert as convert
from headwise import inspection as inspection
from headwise.attention import MultiHeadAttention as MultiHeadAttention
from headwise.backends import BACKENDS as BACKENDS
from headwise.backends.base import Backend as Backend
from headwise.backends.base import Inputs as Inputs
from headwise.caches import KVCache as KVCache
from headwise.errors import AttentionError as AttentionError
from headwise.errors import CacheError as CacheError
from headwise.errors import ConversionError as ConversionError
from headwise.errors import ShapeError as ShapeError
from headwise.errors import UnsupportedError as UnsupportedError
from headwise.explain import Explanation as Explanation
from headwise.explain import explain as explain
from headwise.functional import attention as attention
from headwise.functional import attention_weights as attention_weights
from headwise.functional import attention_with_lse as attention_with_lse
from headwise.functional import merge_partials as merge_partials
from headwise.masks import And as And
from headwise.masks import Causal as Causal
from headwise.masks import Chunk as Chunk
from headwise.masks import CustomMask as CustomMask
from headwise.masks import Dense as Dense
from headwise.masks import Document as Document
from headwise.masks import Full as Full
from headwise.masks import Mask as Mask
from headwise.masks import Not as Not
from headwise.masks import Or as Or
from headwise.masks import Padding as Padding
from headwise.masks import PerHead as PerHead
from headwise.masks import Prefix as Prefix
from headwise.masks import Window as Window
from headwise.notation import draw as draw
from headwise.notation import parse as parse
from headwise.positions import Positions as Positions
from headwise.rotary import RotaryEmbedding as RotaryEmbedding
from headwise.score_mods import ALiBi as ALiBi
from headwise.score_mods import Bias as Bias
from headwise.score_mods import CustomScore as CustomScore
from headwise.score_mods import ScoreMod as ScoreMod
from headwise.score_mods import Softcap as Softcap
from headwise.spans import Spans as Spans

__version__ = "0.1.0"
