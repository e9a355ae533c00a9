"""lm-eval, with a task of its own: no data set is fetched."""

import json
import math
from pathlib import Path

import lm_eval
from checklist import ABSENT_MODEL, Checklist, expect_error
from lm_eval.tasks import TaskManager

checks = Checklist()
FOLDER = Path(checks.folder)
QUESTIONS = [
    {"question": "The capital of France is", "answer": " Paris", "wrong": " banana"},
    {"question": "The capital of Italy is", "answer": " Rome", "wrong": " seventeen"},
    {"question": "The opposite of hot is", "answer": " cold", "wrong": " triangle"},
]
(FOLDER / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
DATA = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(FOLDER / "questions.jsonl")}}}
TASKS = {
    "generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{[answer, wrong]}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}{{answer}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


def evaluate(kind, path, task, model=checks.model, **more):
    config = {"task": f"compat_{task}", "test_split": "test", "doc_to_text": "{{question}}", **DATA, **TASKS[task]}
    arguments = {
        "model": model,
        "base_url": f"{checks.base_url}/{path}",
        "tokenizer": checks.folder,
        "tokenizer_backend": "huggingface",
        "max_length": 512,
        "max_retries": 1,
        **more,
    }
    if task == "perplexity":
        config["doc_to_text"] = ""
    results = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=[config],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        apply_chat_template="chat" in kind,
        bootstrap_iters=0,
    )
    return results["results"][config["task"]], results["samples"][config["task"]]


@checks.check("plain")
def _():
    _, samples = evaluate("local-completions", "completions", "generate")
    answers = [sample["filtered_resps"][0] for sample in samples]
    assert len(answers) == 3 and "Paris" in answers[0]


@checks.check("chat")
def _():
    _, samples = evaluate("local-chat-completions", "chat/completions", "generate")
    assert all(sample["filtered_resps"][0] for sample in samples)


@checks.check("log-likelihoods")
def _():
    """Prompts as token ids, with `echo` and `logprobs`."""
    figures, _ = evaluate("local-completions", "completions", "choose")
    assert figures["acc,none"] == 1.0


@checks.check("log-likelihoods, batched")
def _():
    _, one = evaluate("local-completions", "completions", "choose")
    _, batched = evaluate("local-completions", "completions", "choose", batch_size=3, num_concurrent=2)
    assert [sample["filtered_resps"] for sample in one] == [sample["filtered_resps"] for sample in batched]


@checks.check("rolling log-likelihoods")
def _():
    figures, _ = evaluate("local-completions", "completions", "perplexity")
    assert 1 < figures["word_perplexity,none"] < math.inf


@checks.check("errors")
def _():
    def ask():
        evaluate("local-completions", "completions", "generate", model=ABSENT_MODEL)

    expect_error(Exception, ask)


checks.client_lacks("streamed", "tools", "structured", "embeddings")
