"""`python -m benchmarks.claims`: runs again what is missing, trains the same numbers, and states what was measured."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import assert_as_good_as, randn

from benchmarks.claims import __main__ as program
from benchmarks.claims import page, statements, tasks, training, units, variants
from benchmarks.claims.statements import NOTHING, STATEMENTS
from benchmarks.claims.tasks import TASKS
from benchmarks.claims.units import Unit
from headwise import Causal, Full

ROOT = Path(__file__).parents[1]
SEEDS = ROOT.parent / "shared" / "seeds"
FILES = {
    "entry": "000_2873f499185e0514.txt",
    "article": "001_66790cfd7d2e3605.txt",
    "question": "002_24f22298deb86d6c.txt",
}
# what a killed run is tried on: units of every kind that take a moment each
SOME = "training/recall/*"


def claims(folder, *more):
    command = [sys.executable, "-m", "benchmarks.claims", "--quick", "--folder", str(folder), *more]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A quick run of everything."""
    folder = tmp_path_factory.mktemp("whole")
    process = claims(folder)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return folder, said


def results(folder):
    return {record["unit"]: record for record in units.read(folder / "results.jsonl")}


def test_a_quick_run_has_every_unit_and_writes_the_page(whole):
    folder, said = whole
    records = results(folder)
    expected = [unit for family in program.FAMILIES for unit in family.units(quick=True)]
    assert set(records) == {unit.name for unit in expected}
    assert f"{len(STATEMENTS)} statements" in said
    assert (folder / "claims.md").read_text() == page.text(records)
    for found in page.FIGURES.values():
        for name, _, _ in found:
            # grammar and meaning are only in a full run
            least = 1 if name == "claims_relations" else 30
            assert (folder / f"{name}.svg").read_text().count("<path") >= least, name


def test_a_killed_run_goes_on_and_comes_to_the_same_numbers(whole, tmp_path):
    process = claims(tmp_path, "--only", SOME)
    path = tmp_path / "results.jsonl"
    for _ in range(600):
        if path.exists() and path.read_text().count("\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    text = path.read_text()
    kept = text.count("\n")
    assert kept >= 3
    path.write_text(text + '{"unit": "training/te')  # as if it had been killed while writing
    process = claims(tmp_path, "--only", SOME)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    lines = path.read_text().splitlines()
    assert lines[:kept] == text.splitlines()[:kept], "what was done is kept"
    names = [json.loads(line)["unit"] for line in lines]
    assert len(names) == len(set(names)), "nothing is done twice"
    uninterrupted = results(whole[0])
    again = results(tmp_path)
    assert len(again) == len([name for name in uninterrupted if name.startswith("training/recall/")])
    for name, record in again.items():
        assert record["result"] == uninterrupted[name]["result"], name


def test_processes_end_with_the_one_that_started_them(tmp_path):
    process = claims(tmp_path, "--only", SOME)
    path = tmp_path / "results.jsonl"
    for _ in range(600):
        if path.exists() and path.read_text():
            break
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.kill()
        pytest.skip("this system does not list the children of a process")
    born = [int(pid) for pid in children.read_text().split()]
    assert born
    process.kill()
    process.communicate()
    for _ in range(100):
        left = [pid for pid in born if alive(pid)]
        if not left:
            return
        time.sleep(0.1)
    raise AssertionError(f"processes {left} are left")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_other_settings_are_run_again_and_what_could_not_be_tested_too(tmp_path):
    path = tmp_path / "results.jsonl"
    ask = lambda n: Unit("a", "test_claims:answer", {"n": n})  # noqa: E731
    for given, count in ((1, 1), (1, 1), (2, 2), (0, 3), (0, 4)):
        record = units.run([ask(given)], path, jobs=1)["a"]
        assert record["settings"] == {"n": given}
        assert len(path.read_text().splitlines()) == count


def answer(n):
    return {"n": n} if n else {"not_tested": "nothing is there"}


def fail(n):
    raise ValueError(f"{n} is wrong")


def get_killed(n):
    os.kill(os.getpid(), signal.SIGKILL)


def unwritable(n):
    return {"n": object()}


def test_a_failure_stops_no_other_unit_and_is_told(tmp_path):
    path = tmp_path / "results.jsonl"
    some = [Unit("bad", "test_claims:fail", {"n": 3}), Unit("good", "test_claims:answer", {"n": 1})]
    with pytest.raises(RuntimeError, match=r"1 of 2 units failed; the first is 'bad': 3 is wrong"):
        units.run(some, path, jobs=1)
    assert [record["unit"] for record in units.read(path)] == ["good"]


def test_of_units_whose_process_is_killed_only_the_guilty_one_fails(tmp_path):
    some = [Unit(f"good {i}", "test_claims:answer", {"n": i + 1}) for i in range(5)]
    some.insert(1, Unit("bad", "test_claims:get_killed", {"n": 1}))
    some.append(Unit("timed", "test_claims:answer", {"n": 9}, alone=True))
    path = tmp_path / "results.jsonl"
    with pytest.raises(RuntimeError, match=r"1 of 7 units failed; the first is 'bad'"):
        units.run(some, path, jobs=2)
    assert sorted(record["unit"] for record in units.read(path)) == [*(f"good {i}" for i in range(5)), "timed"]


def test_what_cannot_be_written_is_the_failure_of_its_unit(tmp_path):
    some = [Unit("bad", "test_claims:unwritable", {"n": 1}), Unit("good", "test_claims:answer", {"n": 1})]
    with pytest.raises(RuntimeError, match=r"1 of 2 units failed; the first is 'bad': .*not JSON serializable"):
        units.run(some, tmp_path / "results.jsonl", jobs=1)
    assert len(units.read(tmp_path / "results.jsonl")) == 1


def test_results_of_other_code_do_not_count(tmp_path):
    path, unit = tmp_path / "results.jsonl", Unit("a", "test_claims:answer", {"n": 1})
    units.run([unit], path, jobs=1)
    assert list(units.stored([unit], path)) == ["a"]
    path.write_text(path.read_text().replace(unit.key()["code"], "0" * 16))
    assert units.stored([unit], path) == {}


def test_two_runs_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "results.jsonl"
    with units.writing(path), pytest.raises(RuntimeError, match=r"Another run writes to .*results\.jsonl; wait for it"):
        units.run([Unit("a", "test_claims:answer", {"n": 1})], path, jobs=1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "exact/*", "--fresh"], "--fresh starts everything anew; leave out --only."),
        (["--only", "nothing"], "No unit is called 'nothing'; --list prints their names."),
        (["--docs"], "The documentation is made of all units in full; leave out --quick and --only."),
    ],
)
def test_wrong_calls_say_why(arguments, text, tmp_path):
    process = claims(tmp_path, *arguments)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert said.strip() == text


# ---- the kinds of attention and the tasks ----

EMBED = 16


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_kinds_have_equal_parameters(name):
    count = sum(p.numel() for p in variants.VARIANTS[name](EMBED).parameters())
    assert 4 * EMBED**2 <= count <= 4 * EMBED**2 + 4 * EMBED


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_kinds_start_with_weights_of_the_same_spread(name):
    """Uniform in ±a has the standard deviation a / √3, and Xavier's is √(2 / (inputs + outputs))."""
    torch.manual_seed(0)
    for part, weight in variants.VARIANTS[name](64).named_parameters():
        if part.endswith("proj.weight"):
            spread = (2 / sum(weight.shape)) ** 0.5
            assert 0.95 * spread < weight.std() < 1.05 * spread, part


def written_out(layer, tokens, causal):
    """Each kind with one score, token by token."""
    out = torch.empty_like(tokens)
    for b, row in enumerate(tokens):
        for t in range(len(row)):
            seen = row[: t + 1] if causal else row
            if isinstance(layer, variants.Additive):
                scores = [layer.score(torch.tanh(layer.q_proj(row[t]) + layer.k_proj(key))) for key in seen]
            elif isinstance(layer, variants.FeedForward):
                scores = [layer.score(torch.tanh(layer.k_proj(key))) for key in seen]
            elif isinstance(layer, variants.Scalar):
                scores = [layer.score(key) for key in seen]
            else:
                scores = [torch.zeros(1, dtype=tokens.dtype) for _ in seen]
            exps = torch.cat(scores).exp()
            mixed = sum(w * layer.v_proj(key) for w, key in zip(exps / exps.sum(), seen, strict=True))
            out[b, t] = layer.out_proj(mixed)
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["additive", "feed-forward", "scalar", "mean"])
def test_kinds_equal_their_formulas(name, causal):
    torch.manual_seed(0)
    layer = variants.VARIANTS[name](EMBED)
    tokens = randn(2, 7, EMBED)
    with torch.no_grad():
        got = layer(tokens, mask=Causal() if causal else Full())
        plain = written_out(layer, tokens, causal)
        exact = written_out(layer.double(), tokens.double(), causal)
    assert_as_good_as(got, exact, plain, terms=2 * EMBED)


def test_one_head_is_the_single_head_of_the_same_width():
    torch.manual_seed(0)
    layer, tokens = variants.VARIANTS["1 head"](EMBED), randn(2, 7, EMBED)

    def formula(layer, tokens):
        query, key, value = (proj(tokens) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
        return layer.out_proj((query @ key.mT / EMBED**0.5).softmax(-1) @ value)

    with torch.no_grad():
        got, plain = layer(tokens), formula(layer, tokens)
        exact = formula(layer.double(), tokens.double())
    assert_as_good_as(got, exact, plain, terms=EMBED)


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_in_the_examples(task):
    """What is asked for is what stands there, and what is tested was not trained on."""
    made = TASKS[task](0)
    draw = torch.Generator().manual_seed(3)
    batch = made.batch(4, made.trained[1], draw, test=True)
    inputs, targets = batch.inputs, batch.targets
    if task == "text":
        assert inputs[0, 1:].tolist() == targets[: inputs.shape[1] - 1].tolist()
        held = bytes(tasks.split(tasks.text_bytes(), test=True).tolist())
        assert bytes(inputs[0].tolist()) in held
    elif task == "copy":
        piece, slots = inputs.chunk(2, 1)
        held = bytes(tasks.split(tasks.text_bytes(), test=True).tolist())
        assert all(bytes(row.tolist()) in held for row in piece)
        assert piece.flatten().tolist() == targets.tolist() and set(slots.flatten().tolist()) == {tasks.Copy.EMPTY}
    elif task.startswith("recall"):
        for row, answers in zip(inputs, targets.unflatten(0, (len(inputs), -1)), strict=True):
            *items, (first, _, second) = row.tolist()
            asked = [first, second][: len(answers)]
            for word, right in zip(asked, answers.tolist(), strict=True):
                assert [b for a, b, _ in items if a == word] == [right], "it occurs once, and this follows it"
            if len(answers) == 2:
                assert first != second
    else:
        images, _ = tasks.digits()
        assert len(targets) in (len(images) // 5, len(images) // 5 + 1)
        learned = made.batch(4096, made.trained[1], draw, test=False).inputs
        assert torch.cdist(inputs.flatten(1), learned.flatten(1)).min() > 0, "no image is in both"
    assert inputs.shape[0] in (4, len(targets))


def test_the_fifths_of_the_digits_are_each_other_s_complement():
    draw = torch.Generator().manual_seed(0)
    sizes = [len(tasks.Digits(seed).batch(1, 16, draw, test=True).targets) for seed in range(5)]
    assert sum(sizes) == len(tasks.digits()[0])
    sums = torch.cat([tasks.Digits(seed).batch(1, 16, draw, test=True).inputs.flatten(1) for seed in range(5)])
    # every image once: the pixels of all tests are those of all images
    pixels = tasks.digits()[0].flatten(1)
    assert_as_good_as(
        sums.sort(1).values.sum(0),
        pixels.sort(1).values.double().sum(0),
        pixels.sort(1).values.sum(0),
        terms=len(pixels),
    )


@pytest.mark.parametrize("length", tasks.Digits.PATCHES)
def test_patches_are_the_image(length):
    batch = tasks.Digits(0, length=length).batch(1, length, torch.Generator(), test=True)
    high, wide = tasks.Digits.PATCHES[length]
    images, classes = tasks.digits()
    patches = batch.inputs.unflatten(1, (8 // high, 8 // wide)).unflatten(3, (high, wide))
    again = patches.transpose(2, 3).reshape(-1, 8, 8)
    where = [int(((images == image).flatten(1).all(1)).nonzero()[0]) for image in again[:5]]
    assert classes[where].tolist() == batch.targets[:5].tolist()


def test_the_same_seed_trains_the_same_model():
    layers, rows, *_ = training.PLAN["recall"]
    one, again, other = (training.train("recall", "2 heads", seed, layers, rows, 3, 16) for seed in (0, 0, 1))
    assert one == again != other


# ---- the statements and the page ----


def test_every_line_of_the_texts_is_stated_or_states_nothing():
    if not SEEDS.is_dir():
        pytest.skip("the texts are not beside this checkout")
    for name, file in FILES.items():
        said = {line for statement in STATEMENTS for line in statement.where.get(name, ())}
        nothing = {line for numbers in NOTHING[name] for line in numbers}
        filled = {n for n, line in enumerate((SEEDS / file).read_text().splitlines(), 1) if line.strip()}
        assert not said & nothing, name
        assert filled <= said | nothing, (name, sorted(filled - said - nothing))


def test_every_command_names_units_and_every_term_and_topic_is_used():
    names = [unit.name for family in program.FAMILIES for unit in family.units(quick=False)]
    for statement in STATEMENTS:
        if statement.only is not None:
            assert any(program.fnmatchcase(name, statement.only) for name in names), statement.only
    assert {statement.term for statement in STATEMENTS} == set(statements.TERMS)
    assert {statement.topic for statement in STATEMENTS} == set(statements.TOPICS)


def test_a_verdict_follows_from_the_numbers(whole):
    records = results(whole[0])
    formula = next(s for s in STATEMENTS if s.only == "exact/formula")
    assert formula.judge(records)[1] == statements.HOLDS
    changed = json.loads(json.dumps(records))
    changed["exact/formula"]["result"]["self_attention_error"] = 0.1
    assert formula.judge(changed)[1] == statements.FAILS
    for better, verdict in ((0.9, statements.HOLDS), (0.1, statements.FAILS)):
        for name, record in changed.items():
            if name.startswith("training/"):
                ours = "8 heads" in name
                for tested in record["result"]["tests"].values():
                    tested["right"] = better if ours else 0.5
                    tested["bits"] = 1 - tested["right"]
        assert statements.against(changed, "8 heads", ("1 head",))[1] == verdict


def test_the_page_is_made_from_the_stored_results():
    records = {record["unit"]: record for record in units.read(page.stored(ROOT))}
    assert (ROOT / "docs" / "claims.md").read_text() == page.text(records)
    expected = [unit for family in program.FAMILIES for unit in family.units(quick=False)]
    assert {unit.name: dict(unit.settings) for unit in expected} == {n: r["settings"] for n, r in records.items()}
    assert len({record["made"]["commit"] for record in records.values()}) == 1
