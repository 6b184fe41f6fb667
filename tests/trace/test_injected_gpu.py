"""Faults put into torch's DDP and FSDP2 on two GPUs are the first finding of their traces."""

import pytest

from distlab.testing import run_ranks
from distlab.trace import explain_traces
from tests.trace import injected
from tests.trace.test_lab_traces import STRATEGIES, check_account_without_ranges, record

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module", params=injected.WRAPPERS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    faults = ("healthy", *injected.EXPECTED)
    run_ranks(injected.record, 2, folder, request.param, faults, backend="nccl", deadline_s=240.0)
    return request.param, folder


def explained(folder, fault):
    name = fault.replace(" ", "_")
    return explain_traces([folder / f"{name}_rank{rank}.json.gz" for rank in range(2)])


@pytest.mark.parametrize("fault", injected.EXPECTED)
def test_the_fault_is_the_first_finding(run, fault):
    wrapper, folder = run
    found = explained(folder, fault).findings
    assert found[0].cause == injected.EXPECTED[fault][wrapper], found
    assert found[0].is_large, found


def test_a_healthy_run_has_no_finding(run):
    _, folder = run
    explanation = explained(folder, "healthy")
    assert not any(finding.is_large for finding in explanation.findings), explanation.findings


@pytest.fixture(scope="module")
def lab_traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    run_ranks(record, 2, folder, "small", STRATEGIES, backend="nccl", deadline_s=120.0)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_account_of_nccl_needs_no_ranges(lab_traces, strategy):
    check_account_without_ranges(lab_traces, strategy)
