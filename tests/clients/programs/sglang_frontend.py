"""SGLang's frontend language: gen, select, fork and both joins, streaming, roles, batches, and structured output.

Only its language part is installed: the package's own start imports an engine, so that is gone around.
"""

import importlib.util
import json
import re
import sys
import types

base_url, model = sys.argv[1:]

package = types.ModuleType("sglang")
spec = importlib.util.find_spec("sglang")
assert spec is not None
package.__path__ = list(spec.submodule_search_locations)
sys.modules["sglang"] = package

from sglang.lang import api as sgl  # noqa: E402
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint  # noqa: E402
from sglang.lang.choices import (  # noqa: E402
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

backend = RuntimeEndpoint(base_url)
sgl.set_default_backend(backend)
assert backend.get_server_info()["version"]
sgl.flush_cache()


@sgl.function
def answer(s, question):
    s += "Q: " + question + "\nA:"
    s += sgl.gen("answer", max_tokens=12, stop="\n", temperature=0)


state = answer.run(question="What is the capital of France?")
assert "Paris" in state["answer"]
meta = state.get_meta_info("answer")
assert meta["finish_reason"] in ({"type": "stop", "matched": "\n"}, {"type": "length", "length": 12})

streamed = answer.run(question="What is the capital of France?", stream=True)
assert "".join(streamed.text_iter("answer")) == state["answer"]

states = answer.run_batch([{"question": f"What is {n} plus {n}?"} for n in range(6)], progress_bar=False)
assert all(each["answer"] for each in states)


def chosen(method):
    @sgl.function
    def choose(s):
        s += "The capital of France is"
        s += sgl.select("city", choices=[" London", " Paris", " Berlin"], temperature=0, choices_method=method)

    return choose.run()["city"]


for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized):
    assert chosen(method) == " Paris", method


@sgl.function
def tips(s, mode):
    s += "Two tips for staying healthy: 1. Balanced diet. 2. Regular exercise.\n\n"
    forks = s.fork(2)
    forks += lambda i: f"Tip {i + 1} in detail:" + sgl.gen("detail", max_tokens=8, temperature=0)
    forks.join(mode)
    s += "\nIn short:" + sgl.gen("summary", max_tokens=6, temperature=0)


gathered = tips.run(mode="gather_variable")
assert len(gathered["detail"]) == 2
joined = tips.run(mode="concate_and_append")
assert "".join(f"Tip {i + 1} in detail:{text}" for i, text in enumerate(gathered["detail"])) in joined.text()
assert joined["summary"]


@sgl.function
def chat(s):
    s += sgl.system("You answer briefly.")
    s += sgl.user("What is the capital of France?")
    s += sgl.assistant(sgl.gen("first", max_tokens=12, temperature=0))
    s += sgl.user("And of Italy?")
    with s.assistant():
        s += sgl.gen("second", max_tokens=12, temperature=0)


state = chat.run()
assert state["first"]
assert state["second"]
assert len(state.messages()) == 5


@sgl.function
def scored(s):
    s += "One two three"
    s += sgl.gen("x", max_tokens=3, temperature=0, return_logprob=True, top_logprobs_num=2, logprob_start_len=0)


meta = scored.run().get_meta_info("x")
assert meta["input_token_logprobs"][0][0] is None
assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
assert [token_id for _, token_id, _ in meta["output_token_logprobs"]] == [
    tops[0][1] for tops in meta["output_top_logprobs"]
]


@sgl.function
def typed(s, dtype):
    s += "The number of days in a week, then a word:"
    s += sgl.gen("value", max_tokens=16, temperature=0, dtype=dtype)
    s += "."


for dtype, pattern in ((int, r"[-+]?\d+"), (float, r"[-+]?\d*\.?\d+"), (bool, "True|False"), (str, r'".*"')):
    for stream in (False, True):
        state = typed.run(dtype=dtype, stream=stream)
        for _ in state.text_iter("value") if stream else ():
            pass
        finished = state.get_meta_info("value")["finish_reason"]["type"] == "stop"
        assert not finished or re.fullmatch(pattern, state["value"].strip(), re.DOTALL), (dtype, state["value"])


@sgl.function
def shaped(s):
    s += "The address of the server is "
    s += sgl.gen("address", temperature=0, regex=r"\d{1,3}(\.\d{1,3}){3}")
    s += "\nIts colour is"
    s += sgl.gen("colour", choices=[" red", " green"])
    s += "\nAs JSON: "
    s += sgl.gen("described", temperature=0, json_schema=schema)
    s += sgl.gen_int("count", max_tokens=8, temperature=0)


schema = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "on": {"type": "boolean"}},
        "required": ["name", "on"],
    }
)
state = shaped.run()
assert re.fullmatch(r"\d{1,3}(\.\d{1,3}){3}", state["address"]), state["address"]
assert state["colour"] in (" red", " green")
described = json.loads(state["described"])
assert set(described) == {"name", "on"}
assert isinstance(described["on"], bool)
assert state.get_meta_info("described")["finish_reason"]["type"] == "stop"
assert re.fullmatch(r"[-+]?\d+", state["count"].strip()), state["count"]
print("ok")
