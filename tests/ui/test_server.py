"""What the page's server answers, and whom it refuses."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memfit import api
from memfit.cli.options import read_value
from memfit.core.errors import InvalidRequest, NotCertified
from memfit.export.target import exports
from memfit.plan.request.as_stated import read_stated
from memfit.records import to_json
from memfit.records.request import Request
from memfit.workflows import certify_request

ROOT = Path(__file__).parent.parent.parent
SMALL = {"model": "pythia-70m", "hardware.device": "rtx-4090"}


def ask(server, path, *, method="GET", body=None, **headers):
    """(status, headers, body) of one request on a connection of its own."""
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        link.request(method, path, body, names)
        answer = link.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        link.close()


def query(keys):
    return urllib.parse.urlencode(keys, errors="surrogatepass")


def refused(server, path, status, words, **more):
    found, _, body = ask(server, path, **more)
    said = json.loads(body)
    assert (found, set(said)) == (status, {"error", "hint", "exit_code"}), body
    assert words in said["error"], said
    return said


def test_answers_are_what_the_verbs_print_with_json(server):
    asked = api.read("pythia-70m", changes={"hardware.device": "rtx-4090", "micro_batch": 2})
    words = query({**SMALL, "micro_batch": "2"})
    plan = api.plan(asked)
    for path, verb in (
        (f"/api/plan?{words}", lambda: plan),
        (f"/api/draft?{words}", lambda: api.plan(asked, levers=False)),
        (f"/api/export?{words}&to=trl", lambda: api.export(plan, "trl")),
        (f"/api/why_not?{words}&why_not.micro_batch=4",
         lambda: api.why_not(asked, {"micro_batch": 4})),
        (f"/api/compare?{words}&devices=rtx-4090,rtx-3090&objective=cheapest",
         lambda: api.compare(asked, "rtx-4090,rtx-3090", "cheapest")),
        ("/api/budget?parameters=7B&devices=8&device=h100-sxm",
         lambda: api.budget(parameters="7B", devices="8", device="h100-sxm")),
        ("/api/models", api.models),
        ("/api/devices", api.devices),
    ):  # fmt: skip
        status, headers, body = ask(server, path)
        assert status == 200, body
        assert headers["content-type"] == "application/json"
        assert json.loads(body) == json.loads(to_json(verb())), path


PIPELINE = {
    "model": "gpt2", "hardware.device": "rtx-4090", "hardware.count": "2",
    "framework": "megatron", "parallel": "{pp: 2}", "precision": "bf16-mixed",
    "micro_batch": "1", "task.global_batch": "4", "recompute": "none",
    "task.sequence_length": "512",
}  # fmt: skip


def test_a_pipeline_is_that_of_the_plan(server):
    changes = {
        key: read_value(key, text) for key, text in PIPELINE.items() if key != "model"
    }  # fmt: skip
    plan = api.plan(api.read("gpt2", changes=changes), levers=False)
    status, _, body = ask(server, f"/api/pipeline?{query(PIPELINE)}")
    assert (status, json.loads(body)) == (200, json.loads(to_json(api.draw_pipeline(plan))))
    assert len(json.loads(body)["ranks"]) == 2
    assert ask(server, f"/api/pipeline?{query(SMALL)}")[2] == b"null"


def test_of_many_ranks_the_searched_plan_is_certified(monkeypatch):
    """And what no plan describes as it is stated, which is said; nothing is of another's step."""
    certified = []

    def certify(recipe, **_):
        certified.append(recipe)
        raise NotCertified("stopped here")

    monkeypatch.setattr(certify_request, "certify", certify)
    many = {"hardware.device": "rtx-4090", "hardware.count": 2, "task.sequence_length": 512}
    request = api.read("pythia-70m", changes=many)
    with pytest.raises(NotCertified):
        api.draw_step(request)
    assert certified == [api.plan(request, levers=False).recipe]
    assert certified[0].micro_batch > 1  # plain defaults would be one
    offloaded = api.read("pythia-70m", changes={**many, "offload": "activations"})
    with pytest.raises(NotCertified):
        api.draw_step(offloaded)
    assert certified[1] == read_stated(offloaded).recipe
    with pytest.raises(InvalidRequest, match="another framework's step"):
        api.draw_step(api.read("pythia-70m", changes={**many, "framework": "megatron"}))


def test_a_draft_is_the_plan_without_its_levers(server):
    whole, draft = (
        json.loads(ask(server, f"/api/{verb}?{query(SMALL)}")[2]) for verb in ("plan", "draft")
    )
    assert whole.pop("levers")
    assert draft.pop("levers") == []
    assert draft == whole


def test_every_target_can_be_asked_for(server):
    told = json.loads(ask(server, "/api/words")[2])
    assert told["targets"] == exports.names()
    assert told["frameworks"][0] == "memfit"


CASES = [
    ({"model": "x" * 40_000}, "the model's name has 40,000 characters", "catalogue"),
    ({"model": '{"a":' * 9_000}, "nested too deeply", "a few levels"),
    ({"optimizer": "[" * 9_000}, "", ""),
    ({"model": "llama-3.1-8c"}, "unknown model: `llama-3.1-8c`", "did you mean"),
    ({"model": ""}, "no model was named", "catalogue"),
    ({"sequence": "1"}, "unknown key `sequence`", "known keys"),
    ({"task.global_batch": "0"}, "`task.global_batch: 0`", "whole number"),
    ({"task.global_batch": str(10**18)}, "expected `int` <=", "2^40"),
    ({"limits.memory": "12 apples"}, "cannot read `12 apples` as a memory size", "12 GiB"),
    ({"limits.memory": "0"}, "`limits.memory: 0` in the options: a number without its", "72 GiB"),
    ({"limits.memory": "1e400 GiB"}, "beyond all numbers", "72 GiB"),
    ({"method": "[a"}, "cannot read the value of", "in one line"),
    ({"model": '{"model_type": '}, "the pasted config.json is not JSON", "whole file"),
    ({"model": '{"model_type":"llama"}'}, "lacks `hidden_size`", "complete"),
    ({"model": "../../etc"}, "not below the folder", "paste"),
    ({"model": "/etc"}, "not below the folder", "paste"),
    ({"model": "~/x"}, "not below the folder", "paste"),
    ({"model": "request.yaml"}, "is a file", "memfit plan"),
    ({"hardware.x.y": "1"}, "unknown key", "known keys"),
    ({"hardware.device.x": "1"}, "holds a value, not keys", ""),
]


@pytest.mark.parametrize(("keys", "error", "hint"), CASES)
def test_errors_carry_the_command_lines_text_and_hint(server, keys, error, hint):
    said = refused(server, f"/api/plan?{query({**SMALL, **keys})}", 400, error)
    assert hint in said["hint"]
    assert said["exit_code"] == 2


def test_a_budget_and_a_broken_run_have_hints_too(server):
    said = refused(server, "/api/budget?parameters=7B&devices=0&device=h100-sxm", 400, "above 0")
    assert "follows" in said["hint"]
    (server.runs / "broken").mkdir()
    (server.runs / "broken" / "plan.json").write_text("{")
    assert (
        "write it again"
        in refused(server, "/api/run?name=broken", 400, "is not JSON", x_memfit_token=server.token)[
            "hint"
        ]
    )
    shutil.rmtree(server.runs / "broken")


def test_a_limit_that_nothing_meets_is_told_as_such(server):
    path = f"/api/plan?{query({**SMALL, 'limits.cost': '0.000001 USD'})}"
    assert refused(server, path, 422, "USD")["exit_code"] == 3


def layers_of(n):
    return json.dumps({
        "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80,
        "num_hidden_layers": n, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    })  # fmt: skip


def test_numbers_beyond_all_models_are_refused_at_once(server):
    keys = {"hardware.device": "rtx-4090", "model": layers_of(10**8)}
    refused(server, f"/api/draft?{query(keys)}", 400, "is above 10000, memfit's most")


# what a value may be written as: most are wrong for any key
VALUES = st.one_of(
    st.sampled_from([
        "-1", "1.5", "nan", ".inf", "null", "[]", "{}", "{a: 1}", "[1, [2]]", "1e999", "0x10",
        "2001-01-01", "!!python/object:os.system x", "&a *a", "'", '"', "\\", "%00", "\0", "\x1b",
        "😀", "ﬀ" * 40, "../../../etc/passwd", "a: b: c", "- -", "~", "true", "é" * 4000,
    ]),
    st.text(max_size=40),
    st.floats().map(str),
    st.integers(min_value=10**19).map(str),
)  # fmt: skip
KEYS = st.one_of(
    st.sampled_from([
        *Request.__struct_fields__, "task.steps", "task.global_batch", "lora.rank", "seed",
        "hardware.count", "hardware.price", "limits.memory", "optimizer.eps", "parallel.tp",
        "task.sequence_length", "a.b.c", "schema", "options.x", ".", "a.", ".a",
    ]),
    st.text(min_size=1, max_size=12),
)  # fmt: skip
VERBS = st.sampled_from(
    ["plan", "draft", "pipeline", "why_not", "compare", "export", "budget", "run", "x"]
)


@settings(
    max_examples=200, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(verb=VERBS, keys=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_two_hundred_bad_requests_get_a_reason_and_stop_nothing(server, verb, keys):
    """What happens to be right is answered; nothing is ever answered by a bug."""
    broken = {"nothing-like-it": "1", **keys}
    status, _, body = ask(server, f"/api/{verb}?{query({**SMALL, **broken})}")
    said = json.loads(body)
    assert 400 <= status < 500, (verb, keys, status, said)
    assert said["error"]
    assert "bug" not in said["error"]


@settings(
    max_examples=100, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(key=KEYS, value=VALUES)
def test_one_wrong_value_alone_is_no_bug_either(server, key, value):
    status, _, body = ask(server, f"/api/draft?{query({**SMALL, key: value})}")
    assert status < 500, (key, value, body)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"query": 1}', b'{"query": {"model": 1}}',
     b'{"query": {}, "more": 1}', b'{"query": {"model": "pythia-70m"}, "rank": "x"}'],
)  # fmt: skip
def test_bad_bodies_are_refused_too(server, body):
    status, _, answer = ask(
        server, "/api/jobs", method="POST", body=body, x_memfit_token=server.token
    )
    assert 400 <= status < 500
    assert json.loads(answer)["error"]


@pytest.mark.parametrize(
    "path",
    ["/../pyproject.toml", "/..%2f..%2fpyproject.toml", "/app.js/../../app.py", "/%2e%2e/app.py",
     "//etc/passwd", "/page/app.js", "/api", "/api/", "/api/plan/../words", "/app.py",
     "/README.md"],
)  # fmt: skip
def test_there_is_no_way_out_of_the_page(server, path):
    assert refused(server, path, 404, "is not answered here")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../..", "/etc", "a/../..", "..\\..", "no-such", "\0"]
)
def test_a_run_is_below_the_folder_of_runs(server, name):
    right = {"x_memfit_token": server.token}
    said = json.loads(ask(server, f"/api/run?{query({'name': name})}", **right)[2])
    assert "is no run below" in said["error"] or "holds no plan.json" in said["error"]


def test_a_link_out_of_the_folder_of_runs_is_not_followed(server, tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    (server.runs / "way-out").symlink_to(tmp_path)
    refused(server, "/api/run?name=way-out", 400, "is no run below", x_memfit_token=server.token)
    (server.runs / "way-out").unlink()


def test_only_the_pages_own_origin_may_ask(server):
    here = f"http://127.0.0.1:{server.port}"
    assert ask(server, "/api/words", Origin=here, Sec_Fetch_Site="same-origin")[0] == 200
    for origin in ("http://evil.example", "null", f"http://localhost:{server.port}",
                   f"http://127.0.0.1:{server.port + 1}", "http://["):  # fmt: skip
        refused(server, "/api/words", 403, "may not ask here", Origin=origin)
    for site in ("cross-site", "same-site"):
        refused(server, "/api/words", 403, "another origin", Sec_Fetch_Site=site)
    assert ask(server, "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link that was shared


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "", "[", "127.0.0.1.evil.example"]
)
def test_another_name_for_this_machine_is_refused(server, host):
    refused(server, "/", 403, "is not this machine", Host=host)


def test_what_starts_work_takes_the_token(server):
    body = json.dumps({"query": {"model": "no-such-model"}})
    for token, words in (({}, "missing"), ({"x_memfit_token": "guess"}, "another server")):
        refused(server, "/api/jobs", 403, words, method="POST", body=body, **token)
        refused(server, "/api/jobs/0", 403, words, method="DELETE", **token)
    right = {"x_memfit_token": server.token}
    refused(server, "/api/jobs/0", 400, "there is no certificate `0`", method="DELETE", **right)
    chunked = {"transfer_encoding": "chunked", **right}
    refused(server, "/api/jobs/0", 411, "its length", method="DELETE", body=[b"x"], **chunked)
    before = json.loads(ask(server, "/api/jobs")[2])
    assert ask(server, "/api/jobs")[0] == 200
    assert json.loads(ask(server, "/api/jobs")[2]) == before  # nothing is started by a link
    big = "x" * (2**20 + 1)
    refused(server, "/api/jobs", 413, "the most", method="POST", body=big, **right)


def test_what_this_users_files_hold_takes_the_token(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    data = query({**SMALL, "task.data": "rows.jsonl"})
    folder = query({**SMALL, "model": "mine"})
    right = {"x_memfit_token": server.token}
    for path in ("/api/runs", "/api/run?name=x", f"/api/draft?{data}", f"/api/draft?{folder}"):
        refused(server, path, 403, "the token is missing")
        refused(server, path, 403, "another server", x_memfit_token="guess")
        assert ask(server, path, **right)[0] in (200, 400)
    assert ask(server, f"/api/draft?{query(SMALL)}")[0] == 200  # of no file


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "~root/x", "a\0b", "[/etc/passwd, a]"])
@pytest.mark.parametrize("key", ["task.data", "task.evaluation"])
def test_data_outside_the_folder_is_refused(server, key, name):
    path = f"/api/draft?{query({**SMALL, key: name})}"
    found, _, body = ask(server, path, x_memfit_token=server.token)
    assert found == 400, body
    whole = query({**SMALL, "task": "{data: /etc/passwd}"})
    refused(server, f"/api/draft?{whole}", 400, "names files")


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HT", b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Memfit-Token: T"
              b"\r\nContent-Length: 9\r\n\r\n{"]
)  # fmt: skip
def test_a_request_that_does_not_come_whole_is_not_waited_for(server, begun, monkeypatch):
    monkeypatch.setattr("memfit.ui.patience.SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as link:
        link.sendall(begun.replace(b": T", b": " + server.token.encode()))
        while link.recv(4096):  # until it is closed
            pass


def test_every_answer_forbids_all_but_itself(server):
    for path in ("/", "/app.js", "/api/words", "/nowhere"):
        headers = ask(server, path)[1]
        policy = dict(
            part.split(None, 1) for part in headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.fixture
def started(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-m", "memfit", "ui", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    yield child
    child.kill()
    child.communicate()


def test_the_command_prints_where_it_is_listens_here_alone_and_stops(server, started, tmp_path):
    address = started.stdout.readline().strip()
    port = int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=[\w-]{32}", address)[1])
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    link.request("GET", "/api/runs", headers={"X-Memfit-Token": address.partition("#token=")[2]})
    assert link.getresponse().read() == b"[]"
    link.close()
    taken = subprocess.run(
        [sys.executable, "-m", "memfit", "ui", "--port", str(port), "--no-browser"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert taken.returncode == 2
    assert f"cannot listen on port {port}" in taken.stderr
    assert "--port 0" in taken.stderr
    started.send_signal(signal.SIGINT)
    assert started.wait(300) in (0, 130)
