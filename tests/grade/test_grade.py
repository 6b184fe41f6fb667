"""The command `distlab grade`, and its report."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from distlab.grade import Report, Row, grade
from distlab.grade.as_wrapper import timed
from distlab.grade.hooks import chosen, is_left_out
from distlab.grade.page import page_view, records_of
from distlab.text import for_markdown
from launch.__main__ import main
from launch.grade import GradeOptions, show
from launch.grade import main as grade_command

DOES_NOTHING = """
import torch.distributed as dist


class Wrapper:
    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)


def get_ddp(module):
    return Wrapper(module)


def ddp_on_after_backward(model, optimizer):
    for parameter in model.module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
"""


def submission(folder, source):
    """Write a submission in the public form."""
    (folder / "tests").mkdir()
    (folder / "tests" / "adapters.py").write_text(source)
    return folder


def test_a_wrapper_that_sums_is_said_to_sum(tmp_path, capsys):
    assert main(["grade", str(submission(tmp_path, DOES_NOTHING)), "--only", "ddp", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    broken = {row["invariant"]: row for row in rows if row["status"] == "BROKEN"}
    assert "the sum over ranks" in broken["gradients are the mean over ranks"]["seen"]
    assert "rank 1's own" in broken["every rank starts from rank 0's parameters"]["seen"]
    assert "communication begins before backward ends" in broken
    assert all(row["part"] == "ddp" or row["status"] == "not handed in" for row in rows)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "give the folder"),
        (["/nowhere"], "not a folder"),
        (["."], "has no tests/adapters.py"),
        ([".", "--adapters", "x", "--only", "fdsp"], "allowed are"),
    ],
)
def test_a_mistake_in_the_command_is_one_line(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["grade", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--json", "--csv"], "give one of --json, --markdown and --csv"),
        (["--csv", "--time"], "--time has no column in --csv"),
        (["--only", "fdsp"], "--only fdsp: allowed are"),
    ],
)
def test_a_mistake_that_concerns_every_submission_is_said_at_once(
    arguments, said, capsys, tmp_path
):
    folders = [str(tmp_path), str(tmp_path / "other")]
    assert main(["grade", *folders, *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err and printed.out == ""


RMSNORM = """
import torch


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, eps=1e-5):
        ctx.save_for_backward(x, g)
        ctx.eps = eps
        r = (x.float().pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        return (x.float() * r * g.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, upstream):
        x, g = ctx.saved_tensors
        wide = x.float()
        r = (wide.pow(2).mean(-1, keepdim=True) + ctx.eps).rsqrt()
        u = upstream.float() * g.float()
        dx = r * u - wide * r**3 * (u * wide).mean(-1, keepdim=True)
        dg = (upstream.float() * wide * r).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dg.to(g.dtype), None


def get_rmsnorm_autograd_function_pytorch():
    return Norm
"""


COMPILED = RMSNORM.replace(
    "    @staticmethod\n    def backward",
    "    @staticmethod\n    @torch.compile(backend=takes_too_long)\n    def backward",
).replace("class Norm", "def takes_too_long(graph, inputs):\n    sys.exit(3)\n\n\nclass Norm")


def test_a_submission_that_compiles_is_examined_without_the_compiler(tmp_path, capsys):
    """It takes seconds for each shape, so a right backward would exceed the limit of time."""
    folder = submission(tmp_path, "import sys\n" + COMPILED)
    assert main(["grade", str(folder), "--only", "rmsnorm-pytorch", "--json"]) == 0
    assert COMPILED.count("torch.compile") == 1 and "holds" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["--csv", "--json", "--markdown"])
def test_a_folder_that_cannot_be_examined_costs_no_other_its_report(form, capsys, tmp_path):
    """A class's folder also holds a list of names, and a submission that forgot its adapters."""
    (tmp_path / "right").mkdir()
    right = submission(tmp_path / "right", RMSNORM)
    (tmp_path / "empty").mkdir()
    (tmp_path / "names.txt").write_text("")
    folders = [str(tmp_path / name) for name in ("empty", "names.txt")] + [str(right)]
    assert main(["grade", *folders, "--only", "rmsnorm-pytorch", form]) == 1
    out = capsys.readouterr().out
    for said in ("has no tests/adapters.py", "is not a folder"):
        assert said in out
    if form == "--csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert [row["folder"] for row in rows] == folders
        assert rows[2]["broken"] == "" and "/" in rows[2]["rmsnorm-pytorch"]
    elif form == "--json":
        reports = [json.loads(line) for line in out.splitlines()]
        assert [report["is_right"] for report in reports] == [False, False, True]
    else:
        assert [for_markdown(folder) in out for folder in folders] == [True] * 3


def test_what_ends_the_command_later_takes_no_report_away(capsys, monkeypatch):
    def interrupted(folder, **options):
        if folder == "second":
            raise KeyboardInterrupt
        return Report(folder, [Row("ddp", "gradients are the mean", "holds")])

    monkeypatch.setattr("launch.grade.grade", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grade_command(["first", "second", "--json"])
    assert json.loads(capsys.readouterr().out)["folder"] == "first"


@pytest.mark.parametrize("form", ["csv", "markdown"])
def test_every_form_can_be_printed_whatever_a_submission_says(form, capsys):
    said = "\x1b[31m\ud800\nnext"
    report = Report("mine", [Row("ddp", "it trains", "BROKEN", seen=said)], failure="")
    failed = Report("other", failure=f"it raises {said}")
    titles = ["folder", "seconds", "ddp", "broken"]
    for each in (report, failed):
        show(each, GradeOptions(**{form: True}), csv.DictWriter(sys.stdout, titles))
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"\x1b[31m\ud800" in out.replace("\\\\", "\\")


def test_without_a_wrapper_there_is_nothing_to_time(tmp_path):
    assert timed(tmp_path, "", []) == "not timed: no data-parallel wrapper was handed in"


def test_a_page_that_cannot_be_written_costs_no_other_submission(monkeypatch, capsys, tmp_path):
    def full(view, records, folder):
        raise OSError("No space left on device")

    monkeypatch.setattr("launch.grade.write", full)
    monkeypatch.setattr(
        "launch.grade.grade",
        lambda folder, **options: Report(folder, [Row("ddp", "it trains", "holds")]),
    )
    assert grade_command(["first", "second", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "first: 1 invariants hold" in printed.out and "second: 1 invariants" in printed.out
    assert "no page of second: No space left" in printed.err


@pytest.mark.commands
def test_wrappers_are_timed_without_the_keys_of_the_shell(tmp_path, monkeypatch):
    source = (Path(__file__).parent / "submissions" / "closures.py").read_text()
    source += "\nimport os\nassert 'MY_KEY' not in os.environ\n"
    monkeypatch.setenv("MY_KEY", "secret")
    table = timed(submission(tmp_path, source), "", ["ddp"])
    assert "distlab.grade.as_wrapper:ddp " in table and "failed" not in table, table
    assert "in the page" not in table


def test_times_are_part_of_every_form_that_has_them():
    report = Report("mine", [Row("ddp", "it trains", "holds")], timing="a table of times")
    assert report.to_dict()["timing"] == "a table of times"
    assert "a table of times" in report.markdown() and "a table of times" in str(report)


def test_parts_are_chosen_by_the_beginning_of_their_name():
    assert [part.name for part in chosen(("ddp",), None)] == [
        "ddp-individual",
        "ddp-bucketed",
        "ddp",
    ]
    assert [part.name for part in chosen((), 2024)][-1] == "rmsnorm-triton"


def test_a_report_says_what_is_broken_in_each_form():
    report = Report(
        "mine",
        [
            Row("ddp", "gradients are the mean", "BROKEN", "2 ranks", "two steps", "a", "b | c"),
            Row("fsdp", "it trains", "not handed in", seen="there is no function get_fsdp"),
        ],
    )
    assert "1 are broken; not handed in: fsdp" in str(report)
    assert "expected: a" in str(report)
    assert "b \\| c" in report.markdown()
    assert report.csv_row()["ddp"] == "0/1" and report.csv_row()["fsdp"] == "not handed in"
    assert not report.is_right


HOSTILE = """
def get_ddp_individual_parameters(module):
    raise RuntimeError("<script>alert(1)</script>\\x1b[31m\\ud800")


def get_fsdp(model):
    raise NotImplementedError
"""


def test_a_page_shows_what_the_submission_says_and_obeys_nothing(tmp_path, capsys):
    folder = tmp_path / "<script>mine"
    folder.mkdir()
    out = tmp_path / "outputs"
    words = [str(submission(folder, HOSTILE)), "--only", "ddp-individual,fsdp", "--out", str(out)]
    assert main(["grade", *words]) == 1
    printed = capsys.readouterr().out
    (page,) = out.glob("grade/*/report.html")
    assert printed.splitlines()[-1] == f"report: {page}"
    assert "0 hold, 2 broken" in (out / "index.html").read_text()
    text = page.read_text()
    assert text.index(" are broken") < text.index("<h3>parts</h3>")
    assert "<h3>ddp-individual</h3>" in text and "<h3>fsdp</h3>" not in text
    assert "not handed in: " in text
    for shown in (text, printed):
        assert "alert(1)" in shown and r"\x1b[31m\ud800" in shown and "\x1b" not in shown
    assert "<script>alert" not in text and "<script>mine" not in text
    assert "&lt;script&gt;alert" in text and "&lt;script&gt;mine" in text


@pytest.mark.parametrize(
    "options", [GradeOptions(json=True), GradeOptions(markdown=True), GradeOptions(csv=True)]
)
def test_forms_for_programs_write_no_page(options, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = Report("mine", [Row("ddp", "gradients are the mean", "holds")])
    show(report, options, csv.DictWriter(sys.stdout, ["folder", "seconds", "ddp", "broken"]))
    assert "report:" not in capsys.readouterr().out
    assert not (tmp_path / "outputs").exists()


def test_the_page_has_a_row_for_each_part_and_a_table_for_each_that_is_handed_in():
    report = Report(
        "mine",
        [
            Row("ddp", "gradients are the mean", "holds"),
            Row("ddp", "the order does not matter", "BROKEN", "2 ranks", "x", "a", "b", True),
            Row("fsdp", "it trains", "not handed in", seen="there is no function get_fsdp"),
        ],
    )
    tables = page_view(report).tables(records_of(report, "cpu"))
    shown = {}
    for title, records, columns in tables:
        titles = [column.title for column in columns]
        assert len(titles) <= 7
        shown[title] = []
        for record in records:
            shown[title].append([column.text(record) for column in columns])
    assert shown["parts"] == [
        ["ddp", "1", "1", "0", "0", "0", ""],
        ["fsdp", "", "", "", "", "", "not handed in: there is no function get_fsdp"],
    ]
    assert shown["ddp"] == [
        ["gradients are the mean", "holds", "", "", "", ""],
        ["the order does not matter*", "BROKEN", "2 ranks", "x", "a", "b"],
    ]
    assert list(shown) == ["parts", "ddp"]


LACKS_FORWARD = """
import torch


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def get_ddp(module):
    return Wrapper(module)


def ddp_on_after_backward(model, optimizer):
    pass


def get_flashattention_autograd_function_pytorch():
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, is_causal=False):
            return q.to_sparse().view(-1)  # an operator that torch has not implemented

    return Attention


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, eps):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * g

    @staticmethod
    def backward(ctx, dy):
        raise NotImplementedError


def get_rmsnorm_autograd_function_pytorch():
    return Norm


def rmsnorm_backward_x_pytorch(grad_output, x, g):
    raise NotImplementedError
"""


def test_only_what_the_submission_itself_leaves_out_is_not_handed_in(tmp_path):
    """torch raises NotImplementedError for a module without forward and for an operator that it
    lacks, which are mistakes.
    """
    parts = ["ddp", "rmsnorm-pytorch", "attention-pytorch"]
    report = grade(submission(tmp_path, LACKS_FORWARD), only=parts)
    statuses = {row.status for row in report.of_part("attention-pytorch")}
    assert "BROKEN" in statuses and "not handed in" not in statuses, report
    wrapper = report.of_part("ddp")
    assert wrapper[0].status == "BROKEN" and "forward" in wrapper[0].seen, report
    rows = {row.invariant: row.status for row in report.of_part("rmsnorm-pytorch")}
    assert rows["powers of two: forward"] == "holds", report
    assert rows["powers of two: backward"] == "not handed in", report
    seen = {row.invariant: row.seen for row in report.of_part("rmsnorm-pytorch")}
    assert seen["powers of two: backward"] == "NotImplementedError"  # and no colon after it
    assert rows["the gradient of x by hand"] == "not handed in", report
    assert not report.is_right


def test_generated_code_of_a_library_is_no_file_of_the_submission(tmp_path, monkeypatch):
    """Its name, such as `<string>`, would be found in the folder in which a submission runs."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotImplementedError) as raised:
        exec("raise NotImplementedError")
    assert not is_left_out(raised.value, tmp_path)


STUBS = """
def get_ddp(module): ...
def get_sharded_optimizer(params, optimizer_cls, **options): ...
def get_fsdp(model, compute_dtype=None): ...
def get_flashattention_autograd_function_pytorch(): ...
def get_rmsnorm_autograd_function_pytorch(): ...
"""


def test_a_function_that_returns_nothing_is_not_handed_in(tmp_path):
    parts = ["ddp", "sharded-optimizer", "fsdp", "attention-pytorch", "rmsnorm-pytorch"]
    report = grade(submission(tmp_path, STUBS), only=parts)
    seen = {row.part: row.seen for row in report.rows if "returns None" in row.seen}
    assert list(seen) == parts, report
    assert seen["sharded-optimizer"] == "get_sharded_optimizer returns None"
    assert {row.status for row in report.rows} == {"not handed in"}, report


REFUSES = """
import torch
import torch.nn.functional as F


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g, eps):
        assert x.shape[-1] % 16 == 0, "give a multiple of 16"
        assert x.dtype is torch.float32 and x.is_contiguous()
        with torch.enable_grad():
            ctx.leaves = x.detach().requires_grad_(), g.detach().requires_grad_()
            ctx.y = F.rms_norm(ctx.leaves[0], g.shape, ctx.leaves[1], eps)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, upstream):
        assert upstream.is_contiguous()
        return *torch.autograd.grad(ctx.y, ctx.leaves, upstream), None


def get_rmsnorm_autograd_function_pytorch():
    return Norm
"""


def test_an_input_that_a_kernel_refuses_does_not_count_as_held(tmp_path):
    report = grade(submission(tmp_path, REFUSES), only=["rmsnorm-pytorch"])
    rows = {row.invariant: row for row in report.rows}
    assert rows["powers of two: forward"].status == "holds", report
    # Beyond handouts, an error does no harm.
    for title in (
        "fp16 and bf16: forward",
        "fp16 and bf16: backward",
        "inputs with other strides: forward",
        "upstream gradients with other strides: backward",
    ):
        assert rows[title].status == "refuses" and "AssertionError" in rows[title].seen, report
    refused = rows["rows that are not a power of two: forward"]
    assert refused.status == "BROKEN" and "D=1, fp32: AssertionError" in refused.seen, report
    # A teacher's table counts accepted errors for the student, but no row that was not examined.
    counts = report.counts()
    right = counts["holds"] + counts["refuses"]
    assert report.csv_row()["rmsnorm-pytorch"] == f"{right}/{len(report.rows)}"


@pytest.mark.parametrize(
    "source, said",
    [
        pytest.param(
            "import no_such_package\n\n\ndef get_ddp(module):\n    return module\n",
            "it raises at tests/adapters.py:1: ModuleNotFoundError: No module named "
            "'no_such_package'",
            id="a missing package",
        ),
        pytest.param(
            "from mine import helper\n",
            "it raises at mine.py:2: NameError: name 'heler' is not defined",
            id="an error of the submission's own module",
        ),
        pytest.param(
            "def get_ddp(module)\n    return module\n",
            "it raises: SyntaxError: expected ':' (adapters.py, line 1)",
            id="a mistake in the syntax",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_sentence_in_every_form(
    source, said, tmp_path, capsys
):
    folder = tmp_path / "mine"
    folder.mkdir()
    submission(folder, source)
    (folder / "mine.py").write_text("\nhelper = heler\n")
    report = grade(folder)
    sentence = f"tests/adapters.py cannot be imported: {said}"
    assert report.failure == sentence and report.rows == [] and not report.is_right
    assert str(report) == f"{folder}: {sentence}"
    assert report.markdown() == f"**{for_markdown(str(folder))}: {for_markdown(sentence)}**"
    assert report.to_dict()["failure"] == sentence and report.to_dict()["rows"] == []
    assert report.csv_row() == {
        "folder": str(folder),
        "seconds": round(report.seconds, 1),
        "broken": sentence,
    }
    out = tmp_path / "outputs"
    show(report, GradeOptions(out=str(out)), csv.DictWriter(sys.stdout, []))
    assert sentence in capsys.readouterr().out
    (page,) = out.glob("grade/*/report.html")
    assert page.read_text().count(said.split("'")[0]) >= 1
    assert "nothing was examined" in (out / "index.html").read_text()
