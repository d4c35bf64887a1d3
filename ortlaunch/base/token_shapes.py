"""The shapes of secrets that can be told by their text alone: tokens with a fixed prefix, and private keys.

Each shape is that of its issuer's documentation. GitHub lists most of them as "supported secret scanning patterns".
detect-secrets and gitleaks know more shapes, but they scan files, guess by entropy, and would be a dependency of the
launcher. A name such as ``DB_PASS`` tells about all other secrets; see `ortlaunch.base.secrets`.
"""

from __future__ import annotations

import re

_TOKENS = (
    # ortlaunch serve (`ortlaunch.serve.tokens`).
    r"ort_[A-Za-z0-9_-]{43}",
    # GitHub: "About authentication to GitHub", token formats.
    r"gh[pousr]_[A-Za-z0-9]{16,}",
    r"github_pat_[A-Za-z0-9_]{16,}",
    # GitLab: "Token overview", token prefixes.
    r"gl(?:agent|cbt|dt|feat|ffct|ft|imt|oas|pat|ptt|rt|rtr|soat|wt)-[A-Za-z0-9_.-]{16,}",
    r"GR1348941[A-Za-z0-9_-]{16,}",
    # Hugging Face: "User access tokens".
    r"(?:hf|api_org)_[A-Za-z0-9]{16,}",
    # OpenAI, Anthropic and OpenRouter: API keys. A name such as sk-learn-baseline has neither digit nor capital.
    r"sk-(?=[A-Za-z0-9_-]*[A-Z0-9])[A-Za-z0-9_-]{16,}",
    # Stripe: "API keys" and webhook secrets.
    r"(?:[rs]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,}",
    # Slack: "Token types".
    r"xox[a-z](?:\.xox[a-z])?-[A-Za-z0-9-]{8,}",
    r"xapp-\d-[A-Za-z0-9-]{8,}",
    # AWS: "IAM identifiers", unique ID prefixes; a secret key has no shape of its own, but often follows its id.
    r"(?:ABIA|ACCA|AKIA|ASIA)[A-Z0-9]{16}(?:[:\s,;/]+[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=]))?",
    # Google: API keys, OAuth access tokens and client secrets.
    r"AIza[A-Za-z0-9_-]{35}",
    r"ya29\.[A-Za-z0-9_-]{16,}",
    r"GOCSPX-[A-Za-z0-9_-]{16,}",
    # RFC 7519: a JSON Web Token. Other tokens (Neptune, Docker) are JSON in base64 without its dots.
    r"eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}(?:\.[A-Za-z0-9_-]*)*",
    r"eyJ[A-Za-z0-9_+/-]{37,}={0,2}",
    # Azure: storage account keys are 64 bytes in base64.
    r"[A-Za-z0-9+/]{86}==",
    # Services that training uses: Databricks, Weights & Biases, NVIDIA NGC, Groq, Replicate, Perplexity, Kaggle.
    r"dapi[0-9a-f]{32}\w*",
    r"wandb_v1_[A-Za-z0-9_]{16,}",
    r"nvapi-[A-Za-z0-9_-]{16,}",
    r"gsk_[A-Za-z0-9]{16,}",
    r"r8_[A-Za-z0-9]{16,}",
    r"pplx-[A-Za-z0-9]{16,}",
    r"KGAT_[A-Za-z0-9]{16,}",
    # Package registries: npm, PyPI, Docker Hub, RubyGems.
    r"npm_[A-Za-z0-9]{16,}",
    r"pypi-[A-Za-z0-9_-]{16,}",
    r"dckr_(?:pat|oat)_[A-Za-z0-9_-]{16,}",
    r"rubygems_[0-9a-f]{48}",
    # Infrastructure: Vault, Terraform, DigitalOcean, Grafana, Atlassian, Linear, Tailscale, New Relic, Sentry, Shopify.
    r"hv[bsr]\.[A-Za-z0-9_-]{16,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_-]{16,}",
    r"do[opr]_v1_[0-9a-f]{32,}",
    r"gl(?:c|sa)_[A-Za-z0-9_+/=]{16,}",
    r"ATATT3[A-Za-z0-9_=-]{16,}",
    r"lin_api_[A-Za-z0-9]{16,}",
    r"tskey-[a-z]+-[A-Za-z0-9-]{8,}",
    r"NRAK-[A-Z0-9]{16,}",
    r"sntr[yu]s_[A-Za-z0-9_+/=]{16,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{16,}",
    # Mail and messages: SendGrid, Mailgun, Twilio, Telegram.
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"key-[0-9a-f]{32}",
    r"SK[0-9a-f]{32}",
    r"\d{8,10}:AA[A-Za-z0-9_-]{33}",
    # age: secret keys.
    r"AGE-SECRET-KEY-1[A-Z0-9]{16,}",
)
TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})")
"""A token. What is before it is no letter or digit, so ``disk-…`` and ``whisk-…`` are none."""

WEBHOOK = re.compile(r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[^\s'\"]+")
"""The address of a webhook, which needs no other secret; the first group is what may be shown (Slack, Discord)."""

PRIVATE_KEY = re.compile(
    r"(-----BEGIN[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----)(.*?)(?=-----END[A-Z0-9 ]* PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
"""A private key (RFC 7468; PGP: RFC 9580): its first line, and all before its last line, or the rest of the text."""
