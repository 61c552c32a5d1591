"""lm-eval's local-completions: answers, and log-likelihoods that are those of a direct computation.

It tokenizes by the server (`/tokenizer_info`, `/tokenize`), and scores by echoed prompts, four to a request.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import requests

base_url, model = sys.argv[1:]

QUESTIONS = [
    ("A hen lays 3 eggs a day. How many eggs does she lay in 4 days?", "She lays 3 * 4 = 12 eggs.\n#### 12"),
    ("Tom has 7 pears and eats 2 of them. How many are left?", "There are 7 - 2 = 5 pears left.\n#### 5"),
    ("A pen costs $2 and a book costs $5. How much do both cost?", "Both cost 2 + 5 = $7.\n#### 7"),
    ("Mia reads 10 pages an hour. How long does she need for 60 pages?", "She needs 60 / 10 = 6 hours.\n#### 6"),
    ("Four friends share 12 “grüne Äpfel”. How many has each? 🍏", "Each has 12 / 4 = 3 Äpfel 🍏.\n#### 3"),
]
TASK = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
doc_to_text: "Question: {{question}}\\nAnswer:"
"""
SCORED = """
task: scored
output_type: multiple_choice
doc_to_choice: "{{[answer, likely, 'I do not know.']}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
ANSWERED = """
task: answered
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], temperature: 0.0, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
"""


def post(path, **body):
    response = requests.post(base_url + path, json=body, timeout=60)
    response.raise_for_status()
    return response.json()


def complete(prompt, **body):
    return post("/v1/completions", model=model, prompt=prompt, temperature=0, **body)["choices"][0]


def tokenize(text):
    return post("/tokenize", prompt=text, add_special_tokens=False)["tokens"]


def score(context, continuation):
    """Log-probability of the continuation and whether it is the likeliest, by a prompt's own log-probabilities."""
    token_ids = tokenize(context + continuation)
    entries = complete(token_ids, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"]
    found = [entry[str(token_id)] for token_id, entry in zip(token_ids[1:], entries[1:], strict=True)]
    found = found[len(tokenize(context)) - 1 :]
    return sum(each["logprob"] for each in found), all(each["rank"] == 1 for each in found)


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rows = []
    for question, answer in QUESTIONS:
        whole = complete(f"Question: {question}\nAnswer:", max_tokens=64)
        assert whole["finish_reason"] == "stop"  # so the one token that scoring generates is the one that ends
        rows.append({"question": question, "answer": answer, "likely": whole["text"].removeprefix(" ")})
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for task, text in (("scored", SCORED), ("answered", ANSWERED)):
        (folder / f"{task}.yaml").write_text(text + TASK % (folder / "questions.jsonl"))
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", f"model={model},base_url={base_url}/v1/completions,num_concurrent=2"]
    command += ["--tasks", "scored,answered", "--include_path", name, "--batch_size", "4"]
    command += ["--log_samples", "--output_path", str(folder / "results")]
    environment = {**os.environ, "HF_HOME": name, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True)
    samples = {}
    for task in ("scored", "answered"):
        [path] = folder.glob(f"results/**/samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]

num_likeliest = 0
for sample in samples["scored"]:
    for arguments, [[logprob, is_likeliest]] in zip(sample["arguments"].values(), sample["resps"], strict=True):
        wanted, wanted_likeliest = score(arguments["arg_0"], arguments["arg_1"])
        assert abs(float(logprob) - wanted) < 1e-3, (arguments, logprob, wanted)
        assert (str(is_likeliest) == "True") == wanted_likeliest, arguments
        num_likeliest += wanted_likeliest
assert 0 < num_likeliest < 3 * len(QUESTIONS)
for sample in samples["answered"]:
    [[text]] = sample["resps"]
    assert text == complete(sample["arguments"]["gen_args_0"]["arg_0"], max_tokens=8, stop=["Question:"])["text"]
print("ok")
