"""Prompt data sets: how a row becomes a prompt, and errors about rows that cannot be used."""

import json
from functools import partial

import pytest
from lib.config_errors import refused_key
from lib.rows import Characters, write_rows

from grpo_components.data.columns import other_columns
from grpo_components.data.datasets import (
    code_dataset,
    countdown_dataset,
    gsm8k_dataset,
    math_dataset,
    prompt_dataset,
)

ROWS = [
    {"question": "1 + 1?", "answer": "Count them.\n1+1=<<1+1=2>>2\n#### 2"},
    {"question": "How {many}?", "answer": "#### is a mark.\n#### -1,234,567 "},
    {"question": "Half?", "answer": "#### 0.5"},
]


class ChatTokenizer(Characters):
    """One token per character of a chat, whose messages stand in brackets."""

    def tokenize_messages(self, messages):
        text = "".join(f"[{message.role[0]}:{message.text_content}]" for message in messages)
        return [ord(character) for character in text]

    def __call__(self, sample, inference):
        assert inference
        return {"tokens": self.tokenize_messages(sample["messages"])}


@pytest.fixture
def load(tmp_path):
    """Write rows into a file, and read it as a data set in the format of GSM8K or of a builder."""

    def load(*rows, builder=gsm8k_dataset, file="rows.jsonl", **settings):
        source = str(write_rows(tmp_path / file, *rows))
        return builder(ChatTokenizer(), source=source, **settings)

    return load


def test_a_row_becomes_a_prompt_and_its_final_answer(load):
    """Braces of a template other than the question's stay."""
    prompts = load(*ROWS, prompt_template="Q{}: {question}\n{x}")
    texts = ["Q{}: 1 + 1?\n{x}", "Q{}: How {many}?\n{x}", "Q{}: Half?\n{x}"]
    assert [prompt["prompt_text"] for prompt in prompts] == texts
    assert [prompt["answer"] for prompt in prompts] == ["2", "-1234567", "0.5"]
    assert [prompt["prompt_index"] for prompt in prompts] == [0, 1, 2]
    assert [prompt["prompt_ids"] for prompt in prompts] == [[0, *map(ord, text)] for text in texts]
    assert prompts.max_prompt_length == max(len(prompt["prompt_ids"]) for prompt in prompts)


UNUSABLE = [("question", {"question": bad}) for bad in ("a\ud800?", " \n", 5, None)]
UNUSABLE += [("answer", {"answer": bad}) for bad in ("2", "2 ####", 3, None)]


@pytest.mark.parametrize(("field", "wrong"), UNUSABLE)
def test_a_row_that_cannot_be_used_is_named_with_its_file_and_field(load, field, wrong):
    row = {name: value for name, value in (ROWS[0] | wrong).items() if value is not None}
    with pytest.raises(ValueError, match=rf"bad\.jsonl, row 2.*{field}"):
        load(ROWS[0], row, ROWS[0], file="bad.jsonl")


@pytest.mark.parametrize("answer", ["3", 3])
def test_a_plain_answer_is_refused_with_the_builder_that_takes_it(load, answer):
    row = {"question": "1 + 2?", "answer": answer}
    builder = f"{prompt_dataset.__module__}.{prompt_dataset.__name__}"
    with pytest.raises(ValueError, match=f"; allowed: dataset._component_={builder} for plain"):
        load(row)
    assert load(row, builder=prompt_dataset)[0]["answer"] == "3"


LINES = '{"question": "a?", "answer": "#### 1"}\n' * 2
LAYOUTS = [("a.jsonl", text, "one object a line") for text in (json.dumps(ROWS), "[\n]")]
LAYOUTS += [("a.json", text, r"one list .* one object a line \.jsonl") for text in (LINES, "{}")]


@pytest.mark.parametrize(("name", "text", "allowed"), LAYOUTS)
def test_a_json_file_of_the_other_layout_is_refused_with_its_own(tmp_path, name, text, allowed):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}, .*row 1\b.*; allowed: .*({allowed})$"):
        gsm8k_dataset(Characters(), source=str(tmp_path / name))


def test_a_prompt_that_is_too_long_is_named_with_both_lengths(load):
    longest = load(*ROWS).max_prompt_length
    assert len(load(*ROWS, max_prompt_tokens=longest)) == 3
    numbers = rf"row 2.*question.*{longest} .*max_prompt_tokens.*{longest - 1}"
    with pytest.raises(ValueError, match=numbers):
        load(*ROWS, max_prompt_tokens=longest - 1)


def test_a_hub_data_set_is_asked_for_by_name_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(path, name, split):
        asked.append((path, name, split))
        if path == "some/where":
            raise ConnectionError("offline")
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    hub = partial(gsm8k_dataset, Characters())
    assert len(hub(source="openai/gsm8k", name="main", split="test")) == 3
    assert asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(ValueError, match=r"some/where.*offline"):
        hub(source="some/where")


# ---- which rows are used ------------------------------------------------------------------------


NUMBERED = [{"question": f"{n:02}{'x' * n}", "answer": str(n), "level": n % 3} for n in range(30)]
"""The question of row n has n characters more than that of row 0."""


@pytest.fixture
def chosen(load):
    """The numbers of the rows that are used, and the note on the others."""

    def chosen(**settings):
        prompts = load(*NUMBERED, builder=prompt_dataset, **settings)
        assert all(int(prompt["answer"]) == prompt["prompt_index"] for prompt in prompts)
        return [prompt["prompt_index"] for prompt in prompts], prompts.note

    return chosen


def test_what_was_left_out_is_counted_by_reason_in_one_line(chosen, tmp_path):
    indices, note = chosen(filters={"level": {"max": 1}}, max_prompt_tokens=22, too_long="drop")
    assert indices == [n for n in range(30) if n % 3 < 2 and n <= 19]
    left_out = "10 filtered out, 6 longer than 22 tokens"
    assert note == f"dataset {tmp_path}/rows.jsonl: 14 prompts of 30 rows; {left_out}"
    assert chosen() == (list(range(30)), "")


@pytest.mark.parametrize("partition", [None, "1-2/2"])
def test_the_first_rows_are_the_first_of_those_that_are_left(chosen, partition):
    filters = {"level": {"allowed": [2]}}
    assert chosen(filters=filters, num_rows=3, partition=partition)[0] == [2, 5, 8]


def test_the_parts_of_a_split_are_disjoint_and_cover_it(chosen):
    train, note = chosen(partition="1-3/4")
    validation, _ = chosen(partition="4/4")
    assert sorted(train + validation) == list(range(30))
    assert train and validation
    assert note.endswith(f"{len(train)} prompts of 30 rows; {len(validation)} in other parts")


def test_a_data_set_without_rows_is_named(load):
    with pytest.raises(ValueError, match=r"empty\.jsonl"):
        load(file="empty.jsonl")


def test_a_filtered_row_need_not_be_usable(load):
    assert len(load({"ok": 0}, ROWS[0] | {"ok": 1}, filters={"ok": {"allowed": [1]}})) == 1


def test_columns_may_have_other_names_which_errors_use(load):
    rows, columns = [{"q": "1 + 1?", "a": "#### 2"}, {"q": "2?"}], {"question": "q", "answer": "a"}
    assert load(*rows, columns=columns, num_rows=1)[0]["answer"] == "2"
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2: .* a;.* q$"):
        load(*rows, columns=columns)


def test_filters_use_the_column_names_of_the_source(load):
    rows = [{"question": "a?", "answer": kind, "gold": "#### 1"} for kind in ("yes", "no")]
    columns, filters = {"answer": "gold"}, {"answer": {"allowed": ["no"]}}
    (prompt,) = load(*rows, columns=columns, filters=filters)
    assert prompt["prompt_index"] == 1


def test_filters_that_leave_no_row_say_what_the_columns_hold(load):
    rows = [{"question": "a?", "answer": "#### 1", "level": level} for level in (3, "1", None, 2.5)]
    with pytest.raises(ValueError, match=r"jsonl: no rows left: 4 filtered out, level is 1 to 3$"):
        load(*rows, filters={"level": {"max": 0}})


def test_a_column_for_an_unknown_field_is_refused(load):
    with pytest.raises(ValueError, match=r"^dataset\.columns\.reply: .*: answer, question$"):
        load(*ROWS, columns={"reply": "gold"})


@pytest.mark.parametrize("more", [{}, {"question": "q", "answer": "a"}])
def test_columns_the_wrong_way_round_are_named(load, more):
    columns = {"q": "question", "a": "answer", **more}
    with pytest.raises(ValueError, match=r"is field: column; did you mean \{\w+: [qa]\}\?$"):
        load({"q": "1 + 1?", "a": "#### 2"}, columns=columns)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("too_long", "cut"),
        *(("num_rows", 0), ("num_rows", "3"), ("max_prompt_tokens", 0), ("columns", ["q"])),
        *(("filters", "q"), ("prompt_template", "{}"), ("split", 1), ("system_prompt", 5)),
        *(("prompt_template", "{question} {question}"), ("chat_template_kwargs", "thinking")),
    ],
)
def test_a_wrong_setting_is_refused_with_its_key_and_value(load, key, value):
    with pytest.raises(ValueError) as refused:
        load(*ROWS, **{key: value})
    assert str(refused.value).startswith(f"dataset.{key}: {value!r} given; allowed: ")


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        *((text, text) for text in ("(1,2)", "1, 2", "[2,5)", "3,5", "(1,234)", "1,2345", "x,100")),
        *(("1,234", "1234"), ("-$1,234,567.50", "-$1234567.50"), ("1,234 km", "1234 km")),
    ],
)
def test_only_separators_of_thousands_are_removed(load, written, answer):
    assert load({"question": "q", "answer": f"So.\n#### {written}"})[0]["answer"] == answer


# ---- rows of verl -------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Count."}
USER = {"role": "user", "content": "1 + 1?"}
SAID = {"role": "assistant", "content": "2"}
VERL = {"question": "prompt", "answer": "reward_model.ground_truth"}


@pytest.fixture(params=["jsonl", "json", "parquet"])
def verl(request, load):
    def verl(*chats, **settings):
        rows = [
            {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": str(number)}}
            | {"data_source": "openai/gsm8k", "extra_info": {"index": number}}
            for number, chat in enumerate(chats)
        ]
        given = {"chat_template": "torchtune", "columns": VERL, "builder": prompt_dataset}
        return load(*rows, file=f"rows.{request.param}", **given | settings)

    return verl


def test_chats_become_prompts_with_the_system_message_of_their_row(verl):
    chats = ([USER], [SYSTEM, USER], [USER, SAID, {**USER, "name": "Tom"}])
    prompts = verl(*chats, system_prompt="Default.", prompt_template="Q: {question}")
    assert [prompt["prompt_text"] for prompt in prompts] == [
        "[s:Default.][u:Q: 1 + 1?][a:",
        "[s:Count.][u:Q: 1 + 1?][a:",
        "[s:Default.][u:1 + 1?][a:2][u:Q: 1 + 1?][a:",
    ]
    assert [prompt["answer"] for prompt in prompts] == ["0", "1", "2"]
    assert other_columns(prompts[1])["extra_info"] == {"index": 1}
    assert verl(*chats, filters={"extra_info.index": {"min": 2}})[0]["answer"] == "2"


def test_without_a_chat_template_a_single_message_is_the_text(verl):
    assert verl([USER], chat_template=None)[0]["prompt_text"] == "1 + 1?"
    assert refused_key(verl, [SYSTEM, USER], chat_template=None) == "dataset.chat_template"


@pytest.mark.parametrize(
    "chat",
    [
        *([], [SYSTEM], [USER, SAID], [{"role": "user", "content": " "}]),
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"content": "1 + 1?"}],
    ],
)
def test_what_is_no_chat_with_a_question_at_its_end_is_named_with_its_row(load, chat):
    rows = [{"prompt": each, "answer": 1} for each in ([USER], chat)]
    settings = {"columns": {"question": "prompt"}, "chat_template": "torchtune"}
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2, field prompt: "):
        load(*rows, builder=prompt_dataset, **settings)


@pytest.mark.parametrize(
    ("builder", "columns", "row"),
    [
        (gsm8k_dataset, {"question": "prompt"}, {"answer": "#### 2"}),
        (math_dataset, {"problem": "prompt"}, {"solution": r"\boxed{2}"}),
        (code_dataset, {}, {"tests": ["assert f(1) == 2"]}),
    ],
)
def test_builders_of_other_formats_take_chats(load, builder, columns, row):
    settings = {"columns": columns, "prompt_template": "{question}", "chat_template": "torchtune"}
    (prompt,) = load({"prompt": [SYSTEM, USER], **row}, builder=builder, **settings)
    assert prompt["prompt_text"] == "[s:Count.][u:1 + 1?][a:"


# ---- other formats ------------------------------------------------------------------------------


BOXED = {r"So \boxed{5}.": "5", r"\boxed{1}, then \boxed {\frac{1}{2}}$": r"\frac{1}{2}"}
BOXED |= {r"\boxed{x \} y}": r"x \} y", r"\boxed{1 \\}": r"1 \\", r"\boxed{\boxed{3}}": "3"}
BOXED |= {r"\boxed{4} and \boxed{ }, \boxed{unclosed": "4", r"\boxed{6} \boxedeq{7}": "6"}
BOXED |= {r"\boxed{\text{a } \{1, 2\}}": r"\text{a } \{1, 2\}", r"\fbox{E}": "E"}
BOXED |= {r"\boxed{\left\{ x \right.}$ or so.": r"\left\{ x \right.", r"As $\boxed 5$.": "5"}
BOXED |= {r"So $\boxed -1,234.$": "-1,234", r"$\boxed{1}$, or rather $\boxed2$": "2"}


def test_the_answer_of_a_math_problem_is_in_its_last_box(load):
    rows = [{"problem": "x?", "solution": solution} for solution in BOXED]
    prompts = load(*rows, builder=math_dataset)
    assert dict(zip(BOXED, [prompt["answer"] for prompt in prompts], strict=True)) == BOXED
    text = prompts[0]["prompt_text"]
    assert text.startswith("x?\n") and r"\boxed{}" in text


def test_countdown_puts_numbers_and_target_into_prompt_and_answer(load):
    for numbers in ([3, 8, 1], "[3, 8, 1]"):  # a CSV file has only texts
        (prompt,) = load({"numbers": numbers, "target": 24}, builder=countdown_dataset)
        assert json.loads(prompt["answer"]) == {"numbers": [3, 8, 1], "target": 24}
        assert "Make 24 out of the numbers 3, 8, 1:" in prompt["prompt_text"]


STDIN = {"stdin_stdout": [{"input": "1\n", "output": "2\n"}, {"input": "", "output": ""}]}
ASSERTS = {"asserts": ["assert f(1) == 2"]}


@pytest.fixture
def tests_of(load):
    """The tests in the answer of each programming task."""

    def tests_of(*rows, **settings):
        prompts = load(*({"prompt": "f?", **row} for row in rows), builder=code_dataset, **settings)
        return [json.loads(prompt["answer"]) for prompt in prompts]

    return tests_of


def test_one_table_may_have_tests_of_both_kinds(tests_of):
    """A Parquet file then has both keys in every row, one of them null."""
    assert tests_of({"tests": STDIN}, {"tests": ASSERTS}, file="a.parquet") == [STDIN, ASSERTS]


def test_the_tests_of_a_program_go_into_the_answer(tests_of):
    cases, odd = STDIN["stdin_stdout"], {"asserts": ["f('\ud800')"]}
    labelled = json.dumps([case | {"testtype": "stdin"} for case in cases])
    columns = {"inputs": ["1\n", ""], "outputs": ["2\n", ""]}
    same = [(tests, STDIN) for tests in (STDIN, json.dumps(STDIN), cases, labelled, columns)]
    same += [(ASSERTS, ASSERTS), (ASSERTS["asserts"], ASSERTS), (odd, odd)]
    for tests, answer in same:
        assert tests_of({"tests": tests}) == [answer]


BEFORE = {"test_imports": ["import math"], "test_setup_code": "root = Node(1)"}


def test_imports_and_setup_code_go_into_the_answer(tests_of):
    as_text = {**BEFORE, "test_imports": "import math"}
    rows = [{"tests": ASSERTS["asserts"], **BEFORE}, {"tests": ASSERTS, **as_text}]
    for row in (*rows, {"tests": json.dumps(ASSERTS | BEFORE)}):
        assert tests_of(row) == [ASSERTS | BEFORE]


@pytest.mark.parametrize("solution", ["print(2)", ["print(2)", "print(3)"], '["print(2)"]'])
@pytest.mark.parametrize("name", ["solution", "code"])
@pytest.mark.parametrize("tests", [STDIN, ASSERTS])
def test_the_first_solution_goes_into_the_answer_and_what_is_empty_does_not(
    tests_of, tests, name, solution
):
    found = partial(tests_of, columns={} if name == "solution" else {"solution": name})
    row = {"tests": tests}
    assert found({**row, name: solution}) == [{**tests, "solution": "print(2)"}]
    for imports, set_up in (([], ""), (None, None), ("", "")):
        row |= {"test_imports": imports, "test_setup_code": set_up}
        for none in (None, "", [], "[]"):
            assert found({**row, name: none}) == [tests]


NO_TESTS = [{}, 5, {"asserts": [""]}, {**STDIN, **ASSERTS}, {"stdin_stdout": [{"input": "1"}]}]
NO_TESTS += [{"inputs": ["1"], "outputs": []}]
NO_TESTS += [[{"input": "1", "output": "2", "testtype": "functional"}]]
NOT_SET_UP = [(ASSERTS, "test_setup_code", ["x = 1"]), (STDIN, "test_imports", ["import math"])]
NOT_SET_UP += [(ASSERTS, "solution", 5)]
WRONG = [(math_dataset, {"problem": "x?", **own}, "solution") for own in ({"solution": "5"}, {})]
NO_NUMBERS = ([], [1.5], "[1", [-3, 4])
WRONG += [(countdown_dataset, {"numbers": n, "target": 1}, "numbers") for n in NO_NUMBERS]
WRONG += [(countdown_dataset, {"numbers": [1], "target": t}, "target") for t in ("x", None)]
WRONG += [(code_dataset, {"prompt": "f?", "tests": tests}, "tests") for tests in NO_TESTS]
WRONG += [
    (code_dataset, {"prompt": "f?", "tests": tests, field: value}, field)
    for tests, field, value in NOT_SET_UP
]


@pytest.mark.parametrize(("builder", "row", "field"), WRONG)
def test_a_row_of_another_format_is_named_with_its_field(load, builder, row, field):
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 1.* field {field}\b"):
        load(row, builder=builder)
