"""What is a secret: by its name, by its shape, by its place in a URL, and by what the environment holds."""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from ortlaunch.base.secrets import (
    is_secret,
    may_be,
    redacted,
    scrubbed,
    without_secrets,
    without_secrets_in_words,
    without_tokens,
)
from tests.support.planted import BY_NAME, BY_SHAPE, VARIABLES, found_in

OTHER_NAMES = [
    *("DBPASS", "PGPASSWORD", "MYSQL_PWD", "DB_PASS_B64", "PASSWORD_2", "SSL_KEY", "MY_TOKENS", "AccountKey", "KEY"),
    *("model.params.hub_token", "SLURM_JWT", "TORCH_AUTH", "auth_tokens", "USE_AUTH", "d_token"),
]
HARMLESS_NAMES = [
    *("PATH", "PASSENGERS", "COMPASS", "BYPASS", "PATTERN", "patience", "author", "keyboard", "monkey", "sort_key"),
    *("TOKENIZERS_PARALLELISM", "tokenizer", "tokens", "max_tokens", "max_new_tokens", "pad_token", "eos_token"),
    *(
        "num_key_value_heads",
        "word_token",
        "forward_pass",
        "pass_through",
        "data.path",
        "AWS_SHARED_CREDENTIALS_FILE",
        "dataset",
    ),
]
HARMLESS = [
    "step 5  loss 2.3456  1,234 tokens/s",
    "give KEY=VALUE; missing token: foo; unknown key: model.foo",
    "KeyError: 'x'",
    "the server asks for a password: give one",
    "sk-learn-regression-baseline and disk-0123456789abcdef01234567",
    "sqlite:////a@b/c:d@e.db",
    "http://host:5000/team@home",
    "docker://$oauthtoken@nvcr.io#nvidia/pytorch:24.05",
    "ssh://git@github.com/x/y.git",
    "#SBATCH --signal=B:USR2@120",
    "registry.example:5000/image:tag@sha256:0123456789abcdef",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "basic understanding",
    "    token = tokenizer.decode(ids)  # password = getpass.getpass()",
    "export API_KEY=$(cat ~/.key) DB_PASS=${DB_PASS}",
    "model.params.tokenizer=x train.steps=100 optimizer.lr=1e-3",
    "20260101-120000-gpt2-ort-ddp-abc123",
]


@pytest.mark.parametrize("name", [*BY_NAME, *VARIABLES, *OTHER_NAMES])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_names_that_only_look_like_it(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("kind", BY_SHAPE)
def test_a_secret_is_hidden_wherever_it_stands(kind: str) -> None:
    secret = BY_SHAPE[kind]
    texts = [secret, f"failed with {secret}, sorry", f"({secret})", f"x={secret}", f"'{secret}'", f"a\n  {secret}\nb"]
    for text in texts:
        assert found_in(without_secrets(text, {})) == []
    shown = without_secrets_in_words(["ortlaunch", f"model.params.note={secret}", secret])
    assert found_in(shlex.join(shown)) == []
    # As Hydra writes the words of a sweep's runs.
    escaped = re.sub(r"([\\()\[\]{}:=,\s])", r"\\\1", secret)
    (word,) = without_secrets_in_words([f"model.params.note={escaped}"])
    assert found_in(re.sub(r"\\(.)", r"\1", word)) == []
    assert found_in(json.dumps(without_secrets(json.dumps({"note": secret}), {}))) == []


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_given_under_a_secrets_name_is_hidden(name: str) -> None:
    forms = [f"{name}=hunter2", f"x.{name}=hunter2,x", f"--{name}=hunter2", f"{{a:1,{name}:hunter2}}"]
    forms += [f'"{name}": "hunter2"', f"{name} = 'hunter2'"]
    for form in forms:
        assert found_in(without_secrets(f"ortlaunch {form} end", {})) == [], form
    words = [f"+model.params.{name}=two words, hunter2", f"--{name}", "hunter2"]
    assert found_in(shlex.join(without_secrets_in_words(words))) == []


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert without_secrets(text, {}) == text


def test_values_of_the_environment_are_hidden_in_every_form() -> None:
    values = {"DB_PASS": "p@ss/hunter2", "DATABASE": "postgresql://ann:hunter2-hunter2@db/x", "MY_TOKEN": "dictionary"}
    text = "p@ss/hunter2 p%40ss%2Fhunter2 hunter2-hunter2 dictionary"
    assert without_secrets(text, values) == "*** *** *** dictionary"
    carried = {"ORTLAUNCH_SECRETS": json.dumps({"model.params.x": "carried-hunter2"})}
    assert without_secrets("carried-hunter2", carried) == "***"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://KEY:9/hunter2@bucket/x", "s3://KEY:***@bucket/x"),
        ("s3://bucket/path@2024", "s3://bucket/path@2024"),
        ("redis://:hunter2@host:6379/0", "redis://:***@host:6379/0"),
        ("mssql+pyodbc://u:hun@ter2/x@host/db", "mssql+pyodbc://u:***@host/db"),
        ("https://h/x?X-Amz-Signature=hunter2&x=1", "https://h/x?X-Amz-Signature=***&x=1"),
    ],
)
def test_credentials_of_a_uri(uri: str, shown: str) -> None:
    assert redacted(uri) == shown


def test_an_error_does_not_show_the_rest_of_a_password_with_an_at_sign() -> None:
    uri = "postgresql://ann:p@hunter2@db.example/x"
    error = (
        f'could not translate host name "hunter2@db.example" of {uri}; retried postgresql://ann:p@hunter2@db.example'
    )
    assert found_in(scrubbed(error, uri)) == []
    slash = "http://ann:hunter2/word@host"
    assert found_in(scrubbed("Port could not be cast to integer value as 'hunter2'", slash)) == []


def test_a_patch_stays_a_patch() -> None:
    patch = f"@@ -1,2 +1,6 @@\n a\n+{BY_SHAPE['private key'].replace(chr(10), chr(10) + '+')}\n+token = read(x)\n-b\n"
    shown = without_tokens(patch, {})
    assert found_in(shown) == []
    assert [line[:1] for line in shown.splitlines()] == [line[:1] for line in patch.splitlines()]
    assert "+token = read(x)" in shown


def test_what_is_hidden_twice_stays_the_same() -> None:
    for secret in [*BY_SHAPE.values(), "db_pass=hunter2", "https://a:b@c/d"]:
        once = without_secrets(secret, {})
        assert without_secrets(once, {}) == once


def test_a_long_text_takes_little_time() -> None:
    text = "    def f(self, x_y: int = 3) -> None:  # some-thing/else, http://host/x\n" * 5000
    began = time.process_time()
    without_secrets(text, {})
    assert time.process_time() - began < 5


def test_a_hidden_value_is_known_again() -> None:
    assert may_be("http://u:hunter2@host", "http://u:***@host")
    assert not may_be("http://u:hunter2@elsewhere", "http://u:***@host")


def test_a_text_of_assignments_in_assignments_ends() -> None:
    assert without_secrets("x=:" * 5000).endswith("***")
    assert without_secrets("a=b=c=d=password=hidden-word") == "a=b=c=d=password=***"
