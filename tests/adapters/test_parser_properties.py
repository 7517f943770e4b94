"""Random tensors and parameters against the parsers: a clean request or a refusal of one line, and nothing else."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backend_engine.errors import EngineError, InvalidRequestError
from backend_engine.text.tokenizer import Tokenizer
from backend_engine.triton_io import tensor_table as table
from backend_engine.triton_io.bls_flow import BlsFlow
from backend_engine.triton_io.engine_request import EngineRequest, RequestDefaults
from backend_engine.triton_io.request_parser import RequestParser
from backend_engine.triton_io.request_view import RequestView
from tests.adapters.test_bls import Models, parameters, piece
from tests.adapters.test_prompt_builder import builder
from tests.adapters.test_unbuilt import KINDS
from tests.support.table_model import build_tokenizer

VOCAB, MAX_SEQ_LEN = 40, 64
SIZES = st.integers(0, 3)
EDGES: dict[Any, st.SearchStrategy[Any]] = {
    np.int32: st.sampled_from([0, 1, 2, 3, 39, 40, -1, -2, 2**31 - 1, -(2**31)]),
    np.float32: st.sampled_from(
        [0.0, 1.0, -1.0, 0.5, 2.0, float("nan"), float("inf"), float("-inf"), 2.0**-20, 2.0**100]
    ),
    np.object_: st.sampled_from([b"", b"a", b"\xff\xfe", b"stop", b"x" * 2000, "text", b"\x00"]),
}
TOKENIZER = Tokenizer(build_tokenizer())
OPTIONS = [row for row in table.MODELS[table.ENGINE].inputs if row.name not in ("input_ids", "input_lengths")]
NAMES = [
    *table.input_names(table.ENGINE),
    *table.input_names(table.BLS),
    "id",
    "timeout",
    "request_type",
    "tempratur",
    "x",
]


@st.composite
def tensors(draw: st.DrawFn, dtype: str, num_rows: int) -> np.ndarray:
    """Any array of the type: mostly ``[num_rows, 1]``, sometimes of another shape."""
    kind = KINDS.get(dtype, np.float32)
    usual = st.sampled_from([(num_rows, 1), (num_rows,)])
    shape = draw(st.one_of(usual, usual, usual, st.lists(SIZES, min_size=0, max_size=4).map(tuple)))
    elements = EDGES.get(kind)
    return np.asarray(draw(hnp.arrays(kind, shape, elements=elements)))


@st.composite
def views(draw: st.DrawFn) -> RequestView:
    """A request that is good but for whatever is drawn over it."""
    num_rows = draw(st.integers(1, 3))
    ids = draw(hnp.arrays(np.int32, (num_rows, draw(st.integers(1, 5))), elements=st.integers(0, VOCAB + 5)))
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "input_lengths": np.full(num_rows, ids.shape[1], np.int32),
        "request_output_len": np.full(num_rows, 4, np.int32),
    }
    for row in draw(st.lists(st.sampled_from(OPTIONS), max_size=4)):
        inputs[row.name] = draw(tensors(row.dtype, num_rows))
    for name in draw(st.lists(st.sampled_from(["input_ids", "input_lengths"]), max_size=1)):
        inputs[name] = draw(tensors("TYPE_INT32", num_rows))
    values = st.one_of(st.booleans(), st.integers(-(2**63), 2**63), st.floats(), st.text(max_size=5))
    parameters = draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=2))
    timeout = draw(st.sampled_from([0, 0, 1, 10**6, 2**63 - 1]))
    return RequestView(inputs, parameters, draw(st.sampled_from(["", "a"])), timeout)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(view=views(), decoupled=st.booleans(), reject=st.booleans())
def test_the_engines_parser_refuses_cleanly_or_gives_a_request_that_can_run(
    view: RequestView, decoupled: bool, reject: bool
) -> None:
    parser = RequestParser(
        RequestDefaults(max_sequences=5), VOCAB, MAX_SEQ_LEN, decoupled=decoupled, reject_unknown=reject
    )
    try:
        parsed = parser.parse(view)
    except InvalidRequestError as refusal:
        assert str(refusal) and "\n" not in str(refusal) and len(str(refusal)) < 1000
        return
    if not isinstance(parsed, EngineRequest):
        return
    assert 1 <= sum(row.sampling_params.n for row in parsed.rows) <= 5
    assert decoupled or (len(parsed.rows) == 1 and parsed.rows[0].sampling_params.n == 1)
    for row in parsed.rows:
        assert row.prompt_token_ids and all(0 <= i < VOCAB for i in row.prompt_token_ids)
        params, options = row.sampling_params, row.options
        assert params.max_tokens >= 1 and 0 <= params.min_tokens <= params.max_tokens
        assert params.temperature is None or np.isfinite(params.temperature)
        assert 1 <= options.priority <= 100 and (options.deadline_s is None or options.deadline_s > 0)
        assert params.embedding_bias is None or params.embedding_bias.shape == (VOCAB,)


def one_line(refusal: Exception) -> None:
    assert str(refusal) and "\n" not in str(refusal) and len(str(refusal)) < 1000


@st.composite
def texts(draw: st.DrawFn, model: str, prompt: str, length: str) -> RequestView:
    """A request of a text model, or of preprocessing, with some inputs drawn over."""
    num_rows = draw(st.integers(1, 3))
    prompts = draw(hnp.arrays(np.object_, (num_rows, 1), elements=st.sampled_from([b"Count", b"Text", b"a b", b""])))
    inputs: dict[str, Any] = {prompt: prompts, length: np.full((num_rows, 1), 4, np.int32)}
    for row in draw(st.lists(st.sampled_from(table.MODELS[model].inputs), max_size=4)):
        inputs[row.name] = draw(tensors(row.dtype, num_rows))
    # Triton Server gives these models a batch dimension and one more, always.
    return RequestView({name: values for name, values in inputs.items() if values.ndim >= 2})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(view=texts(table.PREPROCESSING, "QUERY", "REQUEST_OUTPUT_LEN"))
def test_preprocessing_refuses_cleanly_or_gives_rows_that_fit_together(view: RequestView) -> None:
    try:
        outputs = builder(TOKENIZER).build(view.inputs)
    except InvalidRequestError as refusal:
        one_line(refusal)
        return
    num_rows = len(view.inputs["QUERY"])
    assert {name: len(values) for name, values in outputs.items()} == dict.fromkeys(outputs, num_rows)
    lengths = outputs["REQUEST_INPUT_LEN"].reshape(-1)
    assert (lengths >= 1).all() and (lengths <= outputs["INPUT_ID"].shape[1]).all()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(view=texts(table.BLS, "text_input", "max_tokens"))
def test_the_bls_refuses_cleanly_or_asks_the_engine_for_all_rows(view: RequestView) -> None:
    models = Models(piece("a"), piece("b"))
    try:
        responses: list[dict[str, np.ndarray]] = []
        BlsFlow(models, parameters()).run(view, "inner", lambda: False, responses.append)
    except EngineError as refusal:
        one_line(refusal)
        return
    assert len(responses) == 2
    (_, first, _), (_, second, _), *_ = models.calls
    num_rows = len(view.inputs["text_input"])
    assert {len(values) for values in first.values()} == {num_rows}
    options = {name for name in table.engine_from_text().values() if name in second}
    assert {second[name].shape for name in options | {"piecewise"}} == {(num_rows, 1)}
