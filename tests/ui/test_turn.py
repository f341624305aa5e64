"""Questions to the planner: one at a time, none waits for ever, none gets another one's answer."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_server import ROOT, SMALL, ask, query, refused

from memfit import api
from memfit.ui import answers
from memfit.ui.turn import Busy, Turn

THREADS = 40  # of anyio, which starlette runs answers in
LONG = 60  # seconds: of what a busy machine keeps


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is cached, and the planner's turn is this test's own."""

    def set_turn(seconds, most):
        monkeypatch.setattr(answers, "planning", Turn(seconds=seconds, most=most))
        for cached in (answers.plan, answers.draft, answers._draft, answers.pipeline):
            cached.cache_clear()
        return answers.planning

    return set_turn


def test_a_question_that_waits_too_long_is_refused_and_answered_the_next_time(server, fresh):
    path = f"/api/draft?{query(SMALL)}"
    with fresh(0.1, 4).taken():
        said = refused(server, path, 503, "busy with other questions for 0.1 s")
        assert "ask again" in said["hint"]
    assert ask(server, path)[0] == 200


def test_too_many_that_wait_are_refused_at_once_and_the_rest_of_the_page_answers(server, fresh):
    turn = fresh(LONG, 2)
    paths = [f"/api/draft?{query({**SMALL, 'micro_batch': n})}" for n in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        with turn.taken():
            waiting = [threads.submit(ask, server, path) for path in paths]
            third = query({**SMALL, "micro_batch": 3})
            while turn._room._value:  # until both wait
                threading.Event().wait(0.01)
            refused(server, f"/api/draft?{third}", 503, "2 questions are waiting")
            assert ask(server, "/api/words")[0] == 200
            assert ask(server, "/api/runs", x_memfit_token=server.token)[0] == 200
            assert not any(one.done() for one in waiting)
        assert [one.result(LONG)[0] for one in waiting] == [200, 200]


def test_a_question_that_fails_gives_its_turn_back(server, fresh):
    fresh(0.1, 1)
    for _ in range(3):
        refused(server, f"/api/draft?{query({**SMALL, 'micro_batch': 'x'})}", 400, "micro_batch")
    assert ask(server, f"/api/draft?{query(SMALL)}")[0] == 200


def test_questions_at_once_get_their_own_answers_and_the_planner_one_at_a_time(
    server, fresh, monkeypatch
):
    """Each answer is what the question alone is answered; no two are worked out at once."""
    inside, most = [0], [0]

    def watched(work):
        def run(*args, **options):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            try:
                return work(*args, **options)
            finally:
                inside[0] -= 1

        return run

    devices = ("rtx-4090", "rtx-3090", "h100-sxm")
    keys = [
        {"model": "pythia-70m", "hardware.device": d, "task.sequence_length": n}
        for d in devices
        for n in (512, 2048)
    ]
    fresh(LONG, 16)
    alone = [json.loads(ask(server, f"/api/draft?{query(k)}")[2]) for k in keys]
    fresh(LONG, 16)
    for name in ("plan", "draw_pipeline"):
        monkeypatch.setattr(api, name, watched(getattr(api, name)))
    paths = [f"/api/{verb}?{query(k)}" for k in keys for verb in ("draft", "pipeline")]
    with ThreadPoolExecutor(len(paths)) as threads:
        found = list(threads.map(lambda path: ask(server, path), paths))
    assert [status for status, _, _ in found] == [200] * len(paths)
    drafts = [json.loads(body) for _, _, body in found[::2]]
    assert [one["memory"] for one in drafts] == [one["memory"] for one in alone]
    assert [one["recipe"] for one in drafts] == [one["recipe"] for one in alone]
    assert most == [1]


def test_a_turn_is_given_back_whatever_happens_within():
    turn = Turn(seconds=0.01, most=0)
    for _ in range(3):
        with pytest.raises(ValueError, match="within"), turn.taken():
            raise ValueError("within")
    with turn.taken(), pytest.raises(Busy, match="0 questions are waiting"), turn.taken():
        pass


def test_the_page_of_documentation_names_the_limits_that_hold():
    page = (ROOT / "docs" / "page.md").read_text(encoding="utf-8")
    limits = answers.planning
    assert f"for at most {limits.seconds} seconds, at most {limits.most} wait" in page
    assert limits.most < THREADS - 1
