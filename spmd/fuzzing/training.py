"""Training code, as text: losses with their targets, optimizers, and the lines around ``loss.backward()``."""

from __future__ import annotations

from dataclasses import dataclass

# A loss of ``h``, and the targets ``y`` that it reads: ``{shape}`` is that of ``h``, ``{d}`` the size of its dim 1.
LOSSES = (
    ("h.square().mean()", ""),
    ("h.sum()", ""),
    ("F.mse_loss(h, y)", "torch.randn({shape})"),
    ("F.cross_entropy(h, y)", "torch.randint({d}, ({b},))"),
    ("F.cross_entropy(h, y, ignore_index=0)", "torch.arange({b}) % {d}"),
    ("F.cross_entropy(h, y, weight=torch.arange({d}) + 1.0, label_smoothing=0.1)", "torch.randint({d}, ({b},))"),
    ("F.cross_entropy(h, y, reduction='sum')", "torch.randint({d}, ({b},))"),
    ("F.cross_entropy(h, y)", "torch.rand({shape}).softmax(1)"),
    ("F.nll_loss(F.log_softmax(h, 1), y)", "torch.randint({d}, ({b},))"),
    ("F.binary_cross_entropy_with_logits(h, y)", "torch.rand({shape}).round()"),
    ("F.smooth_l1_loss(h, y, reduction='none').sum(-1).mean()", "torch.randn({shape})"),
    ("F.kl_div(F.log_softmax(h, -1), y, reduction='batchmean')", "torch.rand({shape}).softmax(-1)"),
    ("(h * y).sum() / (y > 0).sum()", "torch.rand({shape}).round() + 0.25"),
    ("h[y].square().mean()", "torch.randint({b}, ({b},))"),
    ("h.logsumexp(0).mean()", ""),
    ("F.cosine_embedding_loss(h, h.roll(1, 0), y)", "torch.ones({b})"),
    ("F.triplet_margin_loss(h, h.flip(0), h.roll(1, 0))", ""),
    ("F.multi_margin_loss(h, y)", "torch.randint({d}, ({b},))"),
    ("F.huber_loss(h, y)", "torch.randn({shape})"),
    ("F.gaussian_nll_loss(h, y, h.square() + 1)", "torch.randn({shape})"),
    ("h.std() + h.abs().mean()", ""),
    ("torch.linalg.norm(h)", ""),
    ("F.poisson_nll_loss(h, y)", "torch.rand({shape})"),
    ("F.hinge_embedding_loss(h, y)", "torch.ones({shape})"),
    ("h.square().mean() + sum(p.square().sum() for p in model.parameters())", ""),
    ("h.square().sum() / len(h)", ""),
    ("h.amax()", ""),
)

OPTIMIZERS = (
    "torch.optim.SGD({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9)",
    "torch.optim.Adam({p}, lr=0.1, eps=1e-3)",
    "torch.optim.AdamW({p}, lr=0.1, eps=1e-3)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "torch.optim.SGD({p}, lr=0.1, momentum=0.9, dampening=0.5)",
    "torch.optim.Adam({p}, lr=0.1, eps=1e-3, amsgrad=True, weight_decay=0.1)",
    "torch.optim.RMSprop({p}, lr=0.1, eps=1e-2, momentum=0.9)",
    "torch.optim.Adagrad({p}, lr=0.1, eps=1e-2)",
    "torch.optim.Adadelta({p}, eps=1e-2)",
    "torch.optim.NAdam({p}, lr=0.1, eps=1e-3)",
    "torch.optim.RAdam({p}, lr=0.1, eps=1e-3)",
    "torch.optim.Adamax({p}, lr=0.1, eps=1e-2)",
    "torch.optim.ASGD({p}, lr=0.1)",
    "torch.optim.Adafactor({p}, lr=0.1)",
    "torch.optim.SGD({p}, lr=torch.tensor(0.1))",
    "torch.optim.AdamW({p}, lr=0.1, eps=1e-3, foreach=True)",
    "torch.optim.SGD({p}, lr=0.1, maximize=True)",
)

# What an optimizer is given, ``{p}`` above.
PARAMETERS = (
    "model.parameters()",
    "[p for p in model.parameters() if p.requires_grad]",
    "[{'params': [p], 'lr': 0.01 * (k + 1)} for k, p in enumerate(model.parameters())]",
    "[{'params': model[:1].parameters(), 'weight_decay': 0.1}, {'params': model[1:].parameters()}]",
)


@dataclass(frozen=True)
class Training:
    """The lines of a step: ``before`` all, around forward and loss, and ``after`` the gradients are there.

    ``loop`` stands before the forward pass, which it indents.
    """

    before: tuple[str, ...] = ()
    loop: str = ""
    backward: tuple[str, ...] = ("loss.backward()",)
    after: tuple[str, ...] = ()
    last: tuple[str, ...] = ("optimizer.zero_grad()",)

    def fits(self, has_targets: bool) -> bool:
        """Whether the loop has as many rows of ``x`` as of ``y``: some go through both in pieces, some through one."""
        return (" y " in self.loop) == has_targets or "x." not in self.loop


_NORM = "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
_PIECES = "for x, y in zip(x.chunk(2), y.chunk(2)):"
_GRADS = "p.grad for p in model.parameters() if p.grad is not None"
_TRAINED = "[p for p in model.parameters() if p.requires_grad]"

TRAININGS = (
    Training(),
    Training(before=("optimizer.zero_grad()",), last=()),
    Training(after=(_NORM,)),
    Training(loop="for x in x.chunk(2):", backward=("(loss / 2).backward()",)),
    Training(loop=_PIECES, backward=("(loss / 2).backward()",)),
    Training(loop=_PIECES, after=(_NORM,)),
    Training(loop="for _ in range(2):"),
    Training(loop='with torch.autocast("cpu", torch.bfloat16):'),
    Training(last=()),
    Training(last=("optimizer.zero_grad(set_to_none=False)",)),
    Training(after=("torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)",)),
    Training(after=(f"for g in [{_GRADS}]:", "    g.mul_(0.5)")),
    Training(
        after=(
            f"norm = torch.stack([g.norm() for g in [{_GRADS}]]).norm()",
            f"for g in [{_GRADS}]:",
            "    g /= norm + 1",
        )
    ),
    Training(backward=("loss.backward(retain_graph=True)", "(loss * 0.5).backward()")),
    Training(
        backward=(
            f"trained = {_TRAINED}",
            "for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True)):",
            "    p.grad = g",
        )
    ),
    Training(
        backward=(
            f"grads = torch.autograd.grad(loss, {_TRAINED}, create_graph=True, allow_unused=True)",
            "(loss + sum(g.square().sum() for g in grads if g is not None)).backward()",
        )
    ),
    Training(after=('optimizer.param_groups[0]["lr"] *= 0.5',)),
    Training(
        backward=("loss.backward()", "with torch.no_grad():", "    for p in model.parameters():", "        p.mul_(0.9)")
    ),
    Training(after=("loss = loss.detach()",)),
    Training(backward=("loss.backward()", "optimizer.step()", "optimizer.zero_grad()", "model.zero_grad()"), last=()),
    Training(before=("optimizer.zero_grad()",), loop="for x in (x, x * 0.5):", last=()),
    Training(loop="for x in x.split(3):", backward=("loss.backward()", "optimizer.step()", "optimizer.zero_grad()")),
    Training(before=("x = x.requires_grad_()",)),
)

RESULTS = (
    "loss",
    "loss, h",
    "loss.detach()",
    '{"loss": loss, "rows": h.detach()}',
    "loss, h.argmax(-1)",
    "[loss, (loss, x)]",
    "None",
    "h.mean(0), loss",
    "h.float().mean(), (h > 0).sum()",
)

# Changes to the model before it is trained. ``{m}`` is a layer, ``{o}`` another one, ``{q}`` one of its parameters.
CHANGES = (
    "{m}.requires_grad_(False)",
    "next({m}.parameters()).requires_grad_(False)",
    "{m}.weight = {o}.weight",
    "model.append(nn.Linear(2, 3))",
    "{m}.bias = None",
    "{m}.double()",
    "{m}.to(torch.bfloat16)",
    "{m}.eval()",
    "for p in {m}.parameters():\n    p.grad = torch.ones_like(p)",
    "{m}.register_forward_hook(lambda module, args, result: result * 1.5)",
    "{m}.weight.register_hook(lambda grad: grad * 2)",
    "model.append({m})",
    "{m}.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', p.grad * 0.5))",
    "{m}.weight.data = {m}.weight.data.t().contiguous().t()",
    "model.append(copy.deepcopy({m}))",
)
