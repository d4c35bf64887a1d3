"""The shapes of secrets that can be told by their text alone: tokens with a fixed prefix, and private keys.

Each shape is that of its issuer's documentation. GitHub lists most of them as "supported secret scanning patterns".
detect-secrets and gitleaks know more shapes, but they scan files, guess by entropy, and would be a dependency of the
launcher. A name such as ``DB_PASS`` tells about all other secrets; see `ortlaunch.base.secrets`.
"""

from __future__ import annotations

import re
from functools import cache

_GITLAB = ("agent", "cbt", "dt", "feat", "ffct", "ft", "imt", "oas", "pat", "ptt", "rt", "rtr", "soat", "wt")
_TOKENS: tuple[tuple[tuple[str, ...], str], ...] = (
    # ortlaunch serve (`ortlaunch.serve.tokens`).
    (("ort_",), r"[A-Za-z0-9_-]{43}"),
    # GitHub: "About authentication to GitHub", token formats.
    (("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), r"[A-Za-z0-9]{16,}"),
    (("github_pat_",), r"[A-Za-z0-9_]{16,}"),
    # GitLab: "Token overview", token prefixes.
    (tuple(f"gl{kind}-" for kind in _GITLAB), r"[A-Za-z0-9_.-]{16,}"),
    (("GR1348941",), r"[A-Za-z0-9_-]{16,}"),
    # Hugging Face: "User access tokens".
    (("hf_", "api_org_"), r"[A-Za-z0-9]{16,}"),
    # OpenAI, Anthropic and OpenRouter: API keys. A name such as sk-learn-baseline has neither digit nor capital.
    (("sk-",), r"(?=[A-Za-z0-9_-]*[A-Z0-9])[A-Za-z0-9_-]{16,}"),
    # Stripe: "API keys" and webhook secrets.
    (("rk_live_", "rk_test_", "sk_live_", "sk_test_", "whsec_"), r"[A-Za-z0-9]{16,}"),
    # Slack: "Token types".
    (("xox",), r"[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{8,}"),
    (("xapp-",), r"\d-[A-Za-z0-9-]{8,}"),
    # AWS: "IAM identifiers", unique ID prefixes; a secret key has no shape of its own, but often follows its id.
    (("ABIA", "ACCA", "AKIA", "ASIA"), r"[A-Z0-9]{16}(?:[:\s,;/]+[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=]))?"),
    # Google: API keys, OAuth access tokens and client secrets.
    (("AIza",), r"[A-Za-z0-9_-]{35}"),
    (("ya29.", "GOCSPX-"), r"[A-Za-z0-9_-]{16,}"),
    # RFC 7519: a JSON Web Token. Other tokens (Neptune, Docker) are JSON in base64 without its dots.
    (("eyJ",), r"[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)*"),
    (("eyJ",), r"[A-Za-z0-9_+/-]{37,}={0,2}"),
    # Services that training uses: Databricks, Weights & Biases, NVIDIA NGC, Groq, Replicate, Perplexity, Kaggle.
    (("dapi",), r"[0-9a-f]{32}\w*"),
    (("wandb_v1_",), r"[A-Za-z0-9_]{16,}"),
    (("nvapi-",), r"[A-Za-z0-9_-]{16,}"),
    (("gsk_", "r8_", "pplx-", "KGAT_"), r"[A-Za-z0-9]{16,}"),
    # Package registries: npm, PyPI, Docker Hub, RubyGems.
    (("npm_",), r"[A-Za-z0-9]{16,}"),
    (("pypi-", "dckr_pat_", "dckr_oat_"), r"[A-Za-z0-9_-]{16,}"),
    (("rubygems_",), r"[0-9a-f]{48}"),
    # Infrastructure: Vault, Terraform, DigitalOcean, Grafana, Atlassian, Linear, Tailscale, New Relic, Sentry, Shopify.
    (("hvb.", "hvs.", "hvr."), r"[A-Za-z0-9_-]{16,}"),
    (("doo_v1_", "dop_v1_", "dor_v1_"), r"[0-9a-f]{32,}"),
    (("glc_", "glsa_"), r"[A-Za-z0-9_+/=]{16,}"),
    (("ATATT3",), r"[A-Za-z0-9_=-]{16,}"),
    (("lin_api_",), r"[A-Za-z0-9]{16,}"),
    (("tskey-",), r"[a-z]+-[A-Za-z0-9-]{8,}"),
    (("NRAK-",), r"[A-Z0-9]{16,}"),
    (("sntrys_", "sntryu_"), r"[A-Za-z0-9_+/=]{16,}"),
    (("shpat_", "shpca_", "shppa_", "shpss_"), r"[0-9a-fA-F]{16,}"),
    # Mail and messages: SendGrid, Mailgun, Twilio.
    (("SG.",), r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}"),
    (("key-", "SK"), r"[0-9a-f]{32}"),
    # age: secret keys.
    (("AGE-SECRET-KEY-1",), r"[A-Z0-9]{16,}"),
)
"""The prefixes of each kind of token, and what follows them."""
_WITHIN = (
    # Azure: storage account keys are 64 bytes in base64.
    (r"[A-Za-z0-9+/]{86}", "==", ""),
    # Terraform.
    (r"[A-Za-z0-9]{14}", ".atlasv1.", r"[A-Za-z0-9_-]{16,}"),
    # Telegram.
    (r"\d{8,10}", ":AA", r"[A-Za-z0-9_-]{33}"),
)
"""Tokens without a prefix: what is before a fixed text, this text, and what follows it."""
_FIXED = (*{one for prefixes, _ in _TOKENS for one in prefixes}, *(fixed for _, fixed, _ in _WITHIN))
"""Each token has one of these texts."""


@cache
def _token() -> re.Pattern[str]:
    kinds = [f"(?:{'|'.join(map(re.escape, prefixes))}){rest}" for prefixes, rest in _TOKENS]
    kinds += [f"{before}{re.escape(fixed)}{after}" for before, fixed, after in _WITHIN]
    # What is before a token is no letter or digit, so disk-… and whisk-… are none.
    return re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(kinds)})")


def without_shapes(text: str, mark: str) -> str:
    """Replaces each token in a text by a mark."""
    # Most texts have none of them; to compile the pattern takes 4 ms.
    return _token().sub(mark, text) if any(fixed in text for fixed in _FIXED) else text


WEBHOOK = r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[^\s'\"]+"
"""The address of a webhook, which needs no other secret; the first group is what may be shown (Slack, Discord)."""

PRIVATE_KEY = (
    r"(?s)(-----BEGIN[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----)(.*?)(?=-----END[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
"""A private key (RFC 7468; PGP: RFC 9580): its first line, and all before its last line, or the rest of the text."""
