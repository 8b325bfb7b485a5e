"""What holds for every test: fixed seed, no network, no luck with uninitialised memory, no silent skip."""

import os
import re
import socket

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers

import helpers
import pytest
import torch

import headwise


def pytest_configure(config):
    torch.set_num_threads(1)  # the tensors are small, and threads that wait for each other on a busy machine are slow
    # under deterministic algorithms torch.empty is filled with NaN, so reading what was never written is seen
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    """Connections leave this machine for no test; its own loopback stays open."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family != getattr(socket, "AF_UNIX", None) and address[0] not in (
            "127.0.0.1",
            "::1",
            "localhost",
        ):
            raise OSError(f"a test wanted the network: {address}")
        return connect(self, address)

    socket.socket.connect = guarded
    yield
    socket.socket.connect = connect


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    doctest_namespace.update(helpers.names())


# What the kernel does not do, while the tests of all backends ask for it; test_native.py proves what it does.
NOT_OURS = (
    "it computes in float32, bfloat16 and float16 only",
    "its library was not built when headwise was installed",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except headwise.UnsupportedError as error:
        found = re.match("Backend 'native' cannot run this call: (.*). These can", str(error))
        if found is None or found[1] not in NOT_OURS:
            raise
        pytest.skip(f"the kernel: {found[1]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped:
        said = getattr(report, "wasxfail", None)
        if said is None:
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if said.removeprefix("Skipped").removeprefix(": ").strip() in ("", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped without a reason."
    return report
