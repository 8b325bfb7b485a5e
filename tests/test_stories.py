"""200 greedy tokens of a trained model equal the text that its publisher prints, however they are computed.

That text begins with BOS alone. Rows that hold a longer beginning of it must go on with the rest of it; what
other prompts lead to is compared with the same model on that prompt alone.
"""

import pytest
import stories
import torch
from helpers import assert_as_good_as
from stories import BOS, Stories

from headwise import Causal, Document, DynamicCache, Padding, Positions, RollingCache, StaticCache, Window, pack

# without the annotation hook, with which it takes four times as long
pytestmark = pytest.mark.plain

COUNT = 200
CHUNKS = [7, 1, 20, 32]  # of a prompt of 60 tokens
LENGTHS = [1, 13, 60, 29]  # of the prompts in a batch; the last one is not of the published text
ROOM = max(LENGTHS) + COUNT  # left-padded rows store their padding too
CACHES = {"dynamic": DynamicCache, "static": lambda: StaticCache(ROOM), "rolling": lambda: RollingCache(ROOM)}
EVERYTHING = Causal() & Window(ROOM)  # hides no more than Causal() here, and a cache that forgets demands it


@pytest.fixture(scope="module")
def model():
    stories.needs_the_files()
    return Stories().eval()


@pytest.fixture(scope="module")
def wide(model):
    return Stories(mask=EVERYTHING).eval()


@pytest.fixture(scope="module")
def tokens(model):
    """BOS and the 200 tokens after it, computed anew from all tokens at each step."""
    return [BOS, *alone(model, [BOS], COUNT)]


@pytest.fixture(scope="module")
def other(model, tokens):
    """A prompt that the published text does not begin with, and what it leads to when it is alone."""
    prompt = [BOS, *tokens[100 : 100 + LENGTHS[-1] - 1]]
    return prompt, alone(model, prompt, COUNT)


@torch.no_grad()
def alone(model, prompt, count):
    """The likeliest next token, again and again, without any cache, padding or packing."""
    written = list(prompt)
    for _ in range(count):
        written.append(model(torch.tensor([written]))[0, -1].argmax().item())
    return written[len(prompt) :]


@torch.no_grad()
def through(model, caches, prompt, chunks, count):
    """The same for one sequence through caches, which are given the prompt in chunks."""
    for chunk in torch.tensor([prompt]).split(chunks, 1):
        scores = model(chunk, caches)
    written = [scores[0, -1].argmax().item()]
    while len(written) < count:
        written.append(model(torch.tensor([written[-1:]]), caches)[0, -1].argmax().item())
    return written


@pytest.fixture(params=CACHES)
def cached(request, model, wide):
    """The model, and a cache for each of its layers."""
    suited = wide if request.param == "rolling" else model
    return suited, [CACHES[request.param]() for _ in suited.blocks]


def test_the_file_is_read_whole(model):
    assert model.unread == 0
    assert sum(p.numel() for p in model.parameters()) + sum(t.numel() for t in model.tables) == 264_128


def test_the_stored_rotary_tables_are_ours(model):
    """Turning (1, 0) by each angle gives its cosine and sine."""
    cos, sin = model.tables
    length, pairs = cos.shape
    ones = torch.tensor([1.0, 0.0]).repeat(pairs).expand(1, 1, length, -1)
    turned = model.blocks[0].attention.rotary(ones, torch.arange(length)[None])[0, 0].unflatten(-1, (pairs, 2))
    assert_as_good_as(turned, torch.stack([cos, sin], -1).double(), terms=1)


def test_computed_anew_at_each_step(tokens):
    assert stories.text(tokens[1:]) == stories.published()


@torch.no_grad()
def test_all_at_once(model, tokens):
    """One pass over the text: after each of its tokens the next one is the likeliest."""
    assert model(torch.tensor([tokens[:-1]]))[0].argmax(-1).tolist() == tokens[1:]


@pytest.mark.parametrize("chunks", [[1], CHUNKS], ids=["one by one", "chunks"])
def test_with_a_cache(chunks, cached, tokens):
    known = sum(chunks)
    written = through(*cached, tokens[:known], chunks, COUNT + 1 - known)
    assert stories.text(tokens[1:known] + written) == stories.published()


@pytest.fixture(scope="module")
def near(tokens):
    """A model that sees the last 31 tokens only, and how it goes on: otherwise, as it forgets the beginning."""
    made = Stories(mask=Causal() & Window(31)).eval()
    want = alone(made, tokens[:60], 80)
    assert want != tokens[60:140]
    return made, want


@pytest.mark.parametrize("chunks", [[1] * 60, CHUNKS], ids=["one by one", "chunks"])
def test_with_a_cache_of_the_size_of_a_window(chunks, near, tokens):
    model, want = near
    caches = [RollingCache(31) for _ in model.blocks]
    assert through(model, caches, tokens[:60], chunks, 80) == want


@torch.no_grad()
def test_packed_with_other_prompts(model, tokens, other):
    """All of the text at once, between two other sequences."""
    prompt, continued = other
    packed = pack([torch.tensor(row) for row in (prompt, tokens[:-1], [*prompt, *continued])])
    scores = model(packed.tokens, mask=packed.mask, positions=packed.positions)
    likeliest = [part.argmax(-1).tolist() for part in packed.unpack(scores)]
    assert stories.text(likeliest[1]) == stories.published()
    assert likeliest[0][-1] == continued[0]
    assert likeliest[2][len(prompt) - 1 : -1] == continued


@torch.no_grad()
def test_packed_through_a_cache(model, other):
    """Prompts in one row, and then a token of each in every step."""
    prompt, continued = other
    rows, caches = [list(prompt), [BOS]], [DynamicCache() for _ in model.blocks]
    packed = pack([torch.tensor(row) for row in rows])
    scores = packed.unpack(model(packed.tokens, caches, mask=packed.mask, positions=packed.positions))
    stored, both = [0] * len(rows[0]) + [1] * len(rows[1]), torch.arange(2)
    following = torch.stack([part[-1].argmax() for part in scores])
    for _ in range(COUNT):
        for row, token in zip(rows, following.tolist(), strict=True):
            row.append(token)
        stored += [0, 1]
        places = torch.tensor([[len(row) - 1 for row in rows]])
        mask = Document(both, torch.tensor(stored))
        following = model(following[None], caches, mask=mask, positions=places)[0].argmax(-1)
    assert stories.text(rows[1][1:]) == stories.published()
    assert rows[0] == [*prompt, *continued]


def batch(tokens, other, side):
    """Prompts of different lengths as one tensor, padded on one side with a word that none of them ends with."""
    prompts = [*(tokens[:length] for length in LENGTHS[:-1]), other[0]]
    width = max(LENGTHS)
    filled = [[300] * (width - len(p)) for p in prompts]
    rows = [f + p if side == "left" else p + f for p, f in zip(prompts, filled, strict=True)]
    return torch.tensor(rows), torch.tensor([len(p) for p in prompts])


def check_rows(written, tokens, other):
    """Each row as far as the published text goes, and the other one as it goes on alone."""
    for row, length in zip(written[:-1], LENGTHS[:-1], strict=True):
        assert stories.text(tokens[1:length] + row[: COUNT + 1 - length]) == stories.published()
    assert written[-1] == other[1]


@torch.no_grad()
def test_ragged_prompts_padded_on_the_right(cached, tokens, other):
    """The caches store the real tokens only, and each row goes on at its own length."""
    prompts, lengths = batch(tokens, other, "right")
    (model, caches), done = cached, 0
    following = torch.zeros(len(LENGTHS), dtype=torch.long)
    for chunk in prompts.split(CHUNKS, 1):
        real = (lengths - done).clamp(0, chunk.shape[1])
        scores = model(chunk, caches, lengths=real)
        last = scores[torch.arange(len(real)), (real - 1).clamp(min=0)].argmax(-1)
        following = torch.where(real > 0, last, following)
        done += chunk.shape[1]
    written = [following]
    for _ in range(COUNT - 1):
        written.append(model(written[-1][:, None], caches)[:, 0].argmax(-1))
    check_rows(torch.stack(written, 1).tolist(), tokens, other)


@torch.no_grad()
def test_ragged_prompts_padded_on_the_left(cached, tokens, other):
    """The caches store the padding too; a mask hides it, and positions begin after it."""
    prompts, lengths = batch(tokens, other, "left")
    left = prompts.shape[1] - lengths
    (model, caches), done = cached, 0

    def step(chunk):
        nonlocal done
        places = Positions(chunk.shape[1], start=done, offset=-left)
        done += chunk.shape[1]
        return model(chunk, caches, mask=Padding(left=left), positions=places)[:, -1].argmax(-1)

    written = [[step(chunk) for chunk in prompts.split(CHUNKS, 1)][-1]]
    for _ in range(COUNT - 1):
        written.append(step(written[-1][:, None]))
    check_rows(torch.stack(written, 1).tolist(), tokens, other)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_ragged_prompts_without_a_cache(side, model, tokens, other):
    """What follows each prompt, from one pass over the padded batch."""
    prompts, lengths = batch(tokens, other, side)
    left = prompts.shape[1] - lengths
    if side == "left":
        places = Positions(prompts.shape[1], offset=-left)
        scores = model(prompts, mask=Padding(left=left), positions=places)[:, -1]
    else:
        scores = model(prompts, mask=Padding(lengths))[torch.arange(len(lengths)), lengths - 1]
    want = [tokens[length] for length in LENGTHS[:-1]] + other[1][:1]
    assert scores.argmax(-1).tolist() == want
