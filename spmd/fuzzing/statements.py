"""The statements of forward passes, as text: layers, and expressions of ``h``, the value so far.

A number in a template is an option of the writer: ``{n}`` the size of the last dim of ``h``, ``{d}`` that of dim 1,
``{w}`` another width, ``{b}`` the rows, ``{k}`` a small number, ``{z}`` an earlier value. What does not fit the shape
of ``h`` raises, and is left out: so no template has to say what it fits.
"""

from __future__ import annotations

LAYERS = (
    "nn.Linear({n}, {w})",
    "nn.Linear({n}, {w}, bias=False)",
    "nn.LayerNorm({n})",
    "nn.BatchNorm1d({d})",
    "nn.Sequential(nn.Linear({n}, {w}), nn.Tanh(), nn.Linear({w}, {n}))",
    "nn.RMSNorm({n})",
    "nn.PReLU()",
    "nn.PReLU({d})",
    "nn.GroupNorm({k}, {d})",
    "nn.InstanceNorm1d({d}, affine=True)",
    "nn.Conv1d({d}, {w}, {k}, padding=1)",
    "nn.ConvTranspose1d({d}, {w}, {k})",
    "nn.utils.parametrizations.weight_norm(nn.Linear({n}, {w}))",
    "nn.utils.parametrizations.orthogonal(nn.Linear({n}, {n}))",
    "nn.Dropout(0.25)",
)

# Layers that are called in a way of their own: the layer, and the call of it as ``{m}``.
CALLED = (
    ("nn.Bilinear({n}, {n}, {w})", "{m}(h, h)"),
    ("nn.GRU({n}, {w}, batch_first=True)", "{m}(h)[0]"),
    ("nn.LSTM({n}, {w}, batch_first=True)", "{m}(h)[1][0][-1]"),
    ("nn.RNN({n}, {w})", "{m}(h)[0]"),
    ("nn.MultiheadAttention({n}, {k}, batch_first=True)", "{m}(h, h, h)[0]"),
    ("nn.TransformerEncoderLayer({n}, {k}, 4, dropout=0.0, batch_first=True)", "{m}(h)"),
    ("nn.Embedding({d}, {w})", "{m}(h.argmax(1))"),
    ("nn.Embedding(5, {w}, padding_idx=0)", "{m}(x[..., 0].mul(2).long().clamp(0, 4))"),
    ("nn.EmbeddingBag({d}, {w})", "{m}(h.argsort(1))"),
    ("nn.ParameterList([torch.ones({n})])", "h * {m}[0]"),
    ("nn.ParameterList([torch.ones({n}, {w})])", "h @ {m}[0]"),
    ("nn.ParameterList([torch.ones(())])", "h * {m}[0]"),
    ("nn.ParameterList([torch.ones({n})])", "h + {m}[0].cumsum(0)"),
    ("nn.Linear({n}, {n})", "checkpoint({m}, h, use_reentrant=False)"),
    ("nn.Linear({n}, {n})", "checkpoint(lambda h: F.dropout(torch.tanh({m}(h)), 0.25), h, use_reentrant=False)"),
    ("nn.Linear({n}, {w})", "F.linear(h, {m}.weight.tanh(), {m}.bias)"),
    ("nn.Linear({n}, {w}, bias=False)", "F.linear(h, {m}.weight / {m}.weight.norm(dim=1, keepdim=True))"),
    ("nn.Linear({n}, {w})", "F.linear({m}(h), {m}.weight.t())"),
)

# Loops and branches: whole lines, with ``{m}`` as above.
LINES = (
    ("nn.Linear({n}, {n})", "for _ in range({k}):\n    h = h + torch.tanh({m}(h))"),
    ("nn.Linear({n}, {n})", "for row in {m}.weight[:2]:\n    h = h + row.tanh()"),
    ("nn.Linear({n}, {n})", "if model.training:\n    h = {m}(h)"),
    ("nn.Linear({n}, {n})", "with torch.no_grad():\n    target = {m}(h)\nh = h - target"),
    ("", "h = h.clone()\nh[:, 0] = {k}"),
    ("", "h = h.clone()\nh[0] += 1"),
    ("", "h = h * 1\nh.mul_({k}).add_(1)"),
    ("", "h = h.clone()\nh[h > 0.5] = 0.25"),
    (
        "",
        "total = h.new_zeros({n})\nfor rows in h.split({k}):\n    total = total + rows.sum(0)\nh = h - total",
    ),
    ("", "a, b = h.chunk(2, -1)\nh = a * torch.sigmoid(b)"),
    ("", "a, b = h.chunk(2)\nh = torch.cat([b, a])"),
    ("", "values, index = h.max(1)\nh = h.gather(1, index.unsqueeze(1)) + values.unsqueeze(1)"),
    ("", "q, r = torch.linalg.qr(h.t() @ h + torch.eye({n}))\nh = h @ q"),
    ("", "mean, variance = torch.var_mean(h, 0)\nh = (h - mean) * torch.rsqrt(variance + 1)"),
)

# Mixtures of experts, for meshes with an axis for them: the setup, the layer, and lines as above.
_EXPERTS = (
    "nn.ParameterList([torch.randn({n}, 4), torch.randn(4, {n}, {w}) / 2, torch.randn(4, {w}, {n}) / 2])",
    "weights, chosen = (h @ {m}[0]).softmax(-1).topk(2)",
    "experts, order = chosen.flatten().sort()\nends = experts.bincount(minlength=4).cumsum(0).int()",
)
MIXTURES = (
    ("", _EXPERTS[0], f"""{_EXPERTS[1]}
out = torch.tanh(h.repeat_interleave(2, 0).unsqueeze(1) @ {{m}}[1][chosen.flatten()]) @ {{m}}[2][chosen.flatten()]
h = (out.squeeze(1) * weights.flatten().unsqueeze(1)).unflatten(0, (-1, 2)).sum(1) + h"""),
    ("import transformers.integrations.moe", _EXPERTS[0], f"""{_EXPERTS[1]}
{_EXPERTS[2]}
out = torch.tanh(torch.ops.transformers.grouped_mm_fallback(h[order // 2], {{m}}[1], ends))
out = torch.ops.transformers.grouped_mm_fallback(out, {{m}}[2], ends) * weights.flatten()[order].unsqueeze(1)
h = torch.zeros_like(h).index_add(0, order // 2, out)"""),
    ("", _EXPERTS[0], f"""{_EXPERTS[1]}
hot = F.one_hot(chosen, 4).sum(1)
sent = F.one_hot((hot.cumsum(0) - 1).clamp(0, {{b}} - 1), {{b}}) * hot.unsqueeze(-1) * 1.0
out = torch.tanh(torch.bmm(torch.einsum("bec,bd->ecd", sent, h), {{m}}[1])) @ {{m}}[2]
h = torch.einsum("bec,ecd->bd", sent, out) * weights.sum(1, keepdim=True) + h"""),
)  # fmt: skip

# State beside parameters: how it is made, and what a step does with it.
STATEFUL = (
    ('model.register_buffer("seen", torch.zeros({n}))', "model.seen += h.detach().mean(0)\nh = h - model.seen"),
    ('model.register_buffer("seen", torch.zeros({n}))', "model.seen.lerp_(h.detach().mean(0), 0.1)"),
    ('model.register_buffer("count", torch.tensor(0))', "model.count += 1\nh = h / model.count"),
    (
        'model.register_buffer("scale", torch.ones(()))',
        "model.scale = h.detach().norm()\nh = h / (1 + model.scale)",
    ),
    ("model.calls = 0", "model.calls += 1\nh = h * model.calls"),
    ("model.table = torch.randn({n}, {w})", "h = h @ model.table"),
    (
        "model.average = torch.zeros({n})",
        "model.average = model.average / 2 + h.detach().mean(0)\nh = h + model.average",
    ),
    ("model.queue = []", "model.queue.append(h.detach().mean())"),
    ("model.settings = {{'scale': 2.0}}", "h = h * model.settings['scale']"),
    ('model.register_parameter("bias", nn.Parameter(torch.zeros({n})))', "h = h + model.bias"),
    ('model.register_parameter("scale", nn.Parameter(torch.ones({d}, {n})))', "h = h * model.scale.mean(0)"),
)

# Other arguments of the step: the name, the value, and what reads it.
ARGUMENTS = (
    ("factor", "0.5", "h = h * factor"),
    ("scale", "torch.tensor(2.0)", "h = h * scale"),
    ("noise", "torch.randn({b}, {n})", "h = h + noise"),
    ("weights", "torch.rand({b})", "h = h * weights.unsqueeze(-1)"),
    ("weights", "torch.rand({b})", "h = h * (weights / weights.sum()).view(-1, *[1] * (h.ndim - 1))"),
    ("mask", "torch.arange({b}) % 3 > 0", "h = h.masked_fill(mask.view(-1, *[1] * (h.ndim - 1)), 0.5)"),
    ("mask", "torch.arange({b}) % 3 > 0", "h = torch.where(mask.unsqueeze(1), h, h.mean(0))"),
    ("rows", "torch.arange({b}).flip(0)", "h = h[rows]"),
    ("rows", "torch.arange({b}) // 2", "h = torch.zeros({b}, {n}).index_add(0, rows, h)"),
    ("ids", "torch.arange({b}) % {n}", "h = h.gather(1, ids.unsqueeze(1))"),
    ("ids", "torch.arange({b}) % {n}", "h = h * F.one_hot(ids, {n})"),
    ("ids", "torch.arange({b}) % {n}", "h = h + h.t()[ids, :{n}]"),
    (
        "batch",
        '{{"a": torch.randn({b}, {n}), "b": [torch.ones({b})]}}',
        'h = h + batch["a"] * batch["b"][0].unsqueeze(1)',
    ),
    ("noise", "torch.randn({b}, {n}).t().contiguous().t()", "h = h * noise"),
    ("noise", "torch.randn({b}, {n})", "noise.mul_(0.5)\nh = h + noise"),
)

ROWWISE = """
torch.tanh(h) | torch.sigmoid(h) | F.relu(h) | F.gelu(h) | F.silu(h) | h * h | h.abs() | h.exp() * 0.5 | h.sin()
-h | F.softmax(h, -1) | F.log_softmax(h, -1) | F.softplus(h) | h.clamp(-1, 0.5) | h / (1 + h.abs()) | torch.erf(h)
F.layer_norm(h, h.shape[1:]) | F.normalize(h, dim=-1) | F.glu(h) | F.elu(h) | F.hardtanh(h) | torch.atan2(h, h + 2)
h - h.mean(-1, keepdim=True) | h * h.amax(-1, keepdim=True) | h.sum(-1) | h.mean(1) | h.logsumexp(1) | h.prod(-1)
h.cumsum(1) | h.flip(1) | h.roll({k}, 1) | h.sort(1).values | h.topk(2, 1).values | h.max(1).values | h.norm(dim=1)
h.var(1) | h.median(1).values | h.kthvalue(1, 1).values | h.logcumsumexp(1) | h.amin(1)
h.argmax(1) * h[:, 0] | h.unsqueeze(1) | h.unsqueeze(-1) | h.squeeze(1) | h.transpose(1, -1) | h.flatten(1)
h.reshape(h.shape[0], 2, -1) | h.reshape(h.shape[0], -1, 2) | h.unflatten(1, (2, -1)) | h.view(len(h), -1)
h[:, :2] | h[:, 1:] | h[:, ::2] | h[..., 0] | h[:, [0, 1, 0]] | h[:, -1] | h.narrow(1, 0, 1) | h.repeat(1, 2)
h.expand(-1, 2) | h.repeat_interleave(2, 1) | torch.cat([h, h], 1) | torch.stack([h, h.sin()], 1) | F.pad(h, (1, 1))
h.unfold(1, 2, 1) | h.tril() | h.diagonal(0, -2, -1) | torch.where(h > 0, h, 0.1 * h) | h.masked_fill(h < 0, 0.5)
h.index_select(1, torch.tensor([1, 0])) | h.float() | h.double() | h.to(torch.bfloat16)
torch.einsum('bi,bj->bij', h, h) | torch.bmm(h, h.transpose(1, 2)) | torch.baddbmm(h, h, h) | F.avg_pool1d(h, 2)
F.max_pool1d(h, 2) | F.interpolate(h, scale_factor=2) | torch.fft.rfft(h).abs() | F.unfold(h.unsqueeze(1), 2)
F.scaled_dot_product_attention(h, h, h) | F.scaled_dot_product_attention(*[h[:, None]] * 3, is_causal=True)[:, 0]
F.adaptive_avg_pool1d(h, 2) | F.one_hot(h.argmax(1), h.shape[1]) * h
torch.addcmul(h, h, h, value=0.1) | torch.lerp(h, h.cos(), 0.25) | h.softmax(1) @ torch.ones({n}, {w})
torch.outer(h[:, 0], torch.arange(3.0)) | torch.cdist(h, h) | torch.vmap(torch.tanh)(h)
torch.searchsorted(torch.arange(3.0), h) * h | h.scatter(1, h.argsort(1), h.sin())
"""

ACROSS_ROWS = """
h - h.mean(0) | h / (1 + h.std(0)) | h * h.sum() | h - h.mean() | h / h.norm() | F.softmax(h, 0) | h.cumsum(0)
h * h.amax(0) | h.flip(0) | h.roll({k}, 0) | h.sort(0).values | h.t() | h @ h.t() | h @ (h.t() @ h)
h.sum(0, keepdim=True) + h | h.mean(0) | h[1:] - h[:-1] | h[::2] | h[:-1] | h[1:] | h[-1] + h | h[0] * h
h.topk(2, 0).values | h.max(0).values * h | h.logsumexp(0) + h | h.argsort(0) * h | h[h[:, 0].argsort()]
h.median() + h | h.reshape(-1) | h.reshape(2, -1) | h.reshape(-1, 2) | h.view(-1, {n}) | h.flatten(0, 1)
h.unsqueeze(0) | h.transpose(0, 1) | h.permute(1, 0, 2) | torch.cat([h, h]) | torch.stack([h, h]) | h.repeat(2, 1)
torch.cat([h, h.mean(0, keepdim=True)]) | torch.cat([h[{k}:], h[:{k}]]) | F.pad(h, (0, 0, 1, 0))[:-1]
h.unfold(0, 2, 1) | torch.where(h > h.mean(), h, 0) | h.masked_fill(h == h.max(), 0) | torch.cdist(h, h[:2])
h.index_select(0, torch.tensor([1, 0])) | torch.zeros(3, {n}).index_add(0, x.flatten(1).argmax(1) % 3, h)
h.var(0, unbiased=False) + h | h - h.min() | torch.cov(h.t()) | h[torch.arange(len(h)), 0]
h.scatter_add(0, h.argsort(0), h) | torch.einsum('bi,bj->ij', h, h) | h.tril() | h.trace() * h
h.index_copy(0, torch.tensor([0]), h[1:2]) | h.diff(dim=0) | torch.logcumsumexp(h, 0) | h * (h > 0).sum()
h.std() * h | h.softmax(0).t() @ h | h * torch.arange(len(h)).unsqueeze(1) | torch.corrcoef(h)
h.expand(2, -1, -1).sum(0) | h.chunk(2)[0] | h * h.new_ones({b}, 1) | h + torch.eye(len(h), {n})
h.split([1, len(h) - 1])[1] | h.prod(0) + h | torch.kron(h, h[:1])
"""

RANDOM = """
F.dropout(h, 0.25) | h + torch.randn_like(h) | h * torch.rand(h.shape[0], 1)
h * torch.bernoulli(torch.full_like(h, 0.5)) | h + torch.randn({n}) | h[torch.randperm(len(h))]
F.dropout1d(h, 0.5) | torch.normal(h, 0.1)
"""

JOINED = """
h + {z} | h * {z} | torch.cat([h, {z}], -1) | torch.cat([h, {z}]) | h @ {z}.t() | torch.stack([h, {z}])
torch.where(h > {z}, h, {z}) | h - {z}.mean(0) | torch.maximum(h, {z}) | h * {z}.sum()
F.cosine_similarity(h, {z}, 1) | torch.cdist(h, {z}) | torch.addmm(h, h, h.t() @ {z}) | h + {z}.detach()
torch.einsum('bi,bj->bij', h, {z}) | F.pairwise_distance(h, {z}) | torch.index_add(h, 0, torch.tensor([0]), {z}[:1])
"""


def options(table: str) -> tuple[str, ...]:
    """The expressions of one of the tables above."""
    return tuple(each.strip() for line in table.strip().splitlines() for each in line.split(" | "))
