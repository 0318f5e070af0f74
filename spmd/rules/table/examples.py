"""An example call of an op for each rule, as programs print calls: the letters that are shown are those of the example.

Sizes are the smallest that show what a rule has: dims split evenly over two ranks, and have different sizes where they
have different letters. An op without an example of its own is shown on one of its rule that it takes.
"""

from __future__ import annotations

EXAMPLES = (
    # Pointwise
    "aten.add.Tensor(f32[4, 6], f32[6])",
    "aten.where.self(bool[4, 6], f32[4, 6], f32[4, 6])",
    "aten.mul.Tensor(f32[4, 6], f32[4, 6])",
    "aten.clone(f32[4, 6])",
    "aten.prelu(f32[4, 6], f32[6])",
    # Factories and random draws
    "aten.zeros([4, 6])",
    "aten.full([4, 6], 1.0)",
    "aten.randint(9, [4, 6])",
    "aten.new_zeros(f32[4, 6], [4, 6])",
    "aten.zeros_like(f32[4, 6])",
    "aten.native_dropout(f32[4, 6], 0.5, True)",
    # Views
    "aten.view(f32[4, 6], [4, 2, 3])",
    "aten.t(f32[4, 6])",
    "aten.transpose.int(f32[4, 6], 0, 1)",
    "aten.permute(f32[4, 6, 8], [2, 0, 1])",
    "aten.unsqueeze(f32[4, 6], 1)",
    "aten.squeeze.dim(f32[4, 1, 6], 1)",
    "aten.expand(f32[4, 1], [4, 6])",
    "aten.view_as_real(c64[4, 6])",
    "aten.view_as_complex(f32[4, 6, 2])",
    "aten.view.dtype(f32[4, 6], i32)",
    # Cuts and concatenations
    "aten.slice.Tensor(f32[4, 6], 1, 0, 3)",
    "aten.split.Tensor(f32[4, 6], 3, 1)",
    "aten.split_with_sizes(f32[4, 6], [2, 4], 1)",
    "aten.select.int(f32[4, 6], 1, 0)",
    "aten.cat([f32[4, 6], f32[4, 2]], 1)",
    "aten.stack([f32[4, 6], f32[4, 6]])",
    "aten.slice_backward(f32[4, 3], [4, 6], 1, 0, 3, 1)",
    "aten.select_backward(f32[4], [4, 6], 1, 0)",
    "aten.slice_scatter(f32[4, 6], f32[4, 3], 1, 0, 3)",
    "aten.select_scatter(f32[4, 6], f32[4], 1, 0)",
    "aten.unfold(f32[4, 6], 1, 2, 2)",
    "aten.unfold_backward(f32[4, 3, 2], [4, 6], 1, 2, 2)",
    "aten.tril(f32[4, 6, 6])",
    "aten.constant_pad_nd(f32[4, 6], [1, 1], 0.0)",
    "aten.repeat(f32[4, 6], [1, 2])",
    "aten.repeat_interleave.self_int(f32[4, 6], 2, 1)",
    # Diagonals
    "aten.diagonal(f32[4, 6, 6], 0, 1, 2)",
    "aten.diagonal_backward(f32[4, 6], [4, 6, 6], 0, 1, 2)",
    "aten.diagonal_scatter(f32[4, 6, 6], f32[4, 6], 0, 1, 2)",
    # Reductions
    "aten.sum.dim_IntList(f32[4, 6], [1])",
    "aten.amax(f32[4, 6], [1])",
    "aten.mean.dim(f32[4, 6], [1])",
    "aten.max.dim(f32[4, 6], 1)",
    "aten.var.correction(f32[4, 6], [1], correction=1)",
    "aten.linalg_vector_norm(f32[4, 6], 2, [1])",
    "aten.histc(f32[4, 6], 5, -1, 1)",
    # Along one dim
    "aten._softmax(f32[4, 6], -1, False)",
    "aten._softmax_backward_data(f32[4, 6], f32[4, 6], -1, f32)",
    "aten.cumsum(f32[4, 6], 1)",
    "aten.topk(f32[4, 6], 2)",
    "aten.flip(f32[4, 6], [1])",
    "aten._fft_r2c(f32[4, 6], [1], 0, True)",
    # Distances
    "aten._cdist_forward(f32[4, 3], f32[6, 3], 2.0, None)",
    "aten._cdist_backward(f32[4, 6], f32[4, 3], f32[6, 3], 2.0, f32[4, 6])",
    # Matrix products
    "aten.mm(f32[4, 8], f32[8, 6])",
    "aten.bmm(f32[2, 4, 8], f32[2, 8, 6])",
    "aten.mv(f32[4, 8], f32[8])",
    "aten.dot(f32[8], f32[8])",
    "aten.vdot(f32[8], f32[8])",
    "aten.outer(f32[4], f32[6])",
    "aten.addmm(f32[6], f32[4, 8], f32[8, 6])",
    "aten.baddbmm(f32[2, 4, 6], f32[2, 4, 8], f32[2, 8, 6])",
    "aten.addbmm(f32[4, 6], f32[2, 4, 8], f32[2, 8, 6])",
    "aten.addmv(f32[4], f32[4, 8], f32[8])",
    "aten.addr(f32[4, 6], f32[4], f32[6])",
    "aten.linear(f32[4, 8], f32[6, 8], f32[6])",
    "aten._trilinear(f32[4, 6], f32[4, 8], f32[6, 8], [2], [1], [0], [1])",
    "aten._grouped_mm(f32[8, 16], f32[2, 16, 32], i32[2])",
    "transformers.grouped_mm_fallback(f32[8, 16], f32[2, 16, 32], i32[2])",
    "transformers.grouped_mm_fallback_backward(f32[8, 16], f32[2, 16, 32], i32[2], f32[8, 32])",
    # Linear algebra
    "aten._linalg_svd(f32[4, 6, 3])",
    "aten.cholesky_solve(f32[4, 3, 2], f32[4, 3, 3])",
    "aten._linalg_solve_ex(f32[4, 3, 3], f32[4, 3, 2])",
    # Rows by index
    "aten.embedding(f32[10, 6], i64[4, 8])",
    "aten.embedding_dense_backward(f32[4, 8, 6], i64[4, 8], 10, -1, False)",
    "aten.gather(f32[4, 6], 1, i64[4, 2])",
    "aten.scatter.src(f32[4, 6], 1, i64[4, 2], f32[4, 2])",
    "aten.scatter_add(f32[4, 6], 1, i64[4, 2], f32[4, 2])",
    "aten.index_select(f32[10, 6], 0, i64[4])",
    "aten.index_add(f32[10, 6], 0, i64[4], f32[4, 6])",
    "aten.index.Tensor(f32[10, 6], [i64[4]])",
    "aten.index_put(f32[10, 6], [i64[4]], f32[4, 6], True)",
    "spmd_rows.places(bool[4, 6], 2, '')",
    "aten.one_hot(i64[4, 8], 7)",
    "aten.bucketize.Tensor(f32[4, 6], f32[3])",
    "aten.searchsorted.Tensor(f32[3], f32[4, 6])",
    "aten.isin.Tensor_Tensor(i64[4, 6], i64[3])",
    # Norms
    "aten.native_layer_norm(f32[4, 6], [6], f32[6], f32[6], 1e-5)",
    "aten.native_layer_norm_backward(f32[4, 6], f32[4, 6], [6], f32[4, 1], f32[4, 1], f32[6], f32[6], "
    "[True, True, True])",
    "aten._fused_rms_norm(f32[4, 6], [6], f32[6], 1e-5)",
    "aten._fused_rms_norm_backward(f32[4, 6], f32[4, 6], [6], f32[4, 1], f32[6], [True, True])",
    "aten.native_group_norm(f32[4, 6, 5], f32[6], f32[6], 4, 6, 5, 2, 1e-5)",
    "aten.native_group_norm_backward(f32[4, 6, 5], f32[4, 6, 5], f32[4, 2], f32[4, 2], f32[6], 4, 6, 5, 2, "
    "[True, True, True])",
    "aten.native_batch_norm(f32[4, 6, 5], f32[6], f32[6], f32[6], f32[6], False, 0.1, 1e-5)",
    "aten._native_batch_norm_legit_no_training(f32[4, 6, 5], f32[6], f32[6], f32[6], f32[6], 0.1, 1e-5)",
    "aten.native_batch_norm_backward(f32[4, 6, 5], f32[4, 6, 5], f32[6], f32[6], f32[6], f32[6], f32[6], False, 1e-5, "
    "[True, True, True])",
    # Attention
    "aten._scaled_dot_product_flash_attention_for_cpu(f32[4, 6, 8, 16], f32[4, 6, 8, 16], f32[4, 6, 8, 16], 0.0, True)",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward(f32[4, 6, 8, 16], f32[4, 6, 8, 16], f32[4, 6, 8, 16], "
    "f32[4, 6, 8, 16], f32[4, 6, 8, 16], f32[4, 6, 8], 0.0, True)",
    # Convolutions, pools, samples
    "aten.convolution(f32[4, 6, 5, 5], f32[8, 6, 3, 3], f32[8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)",
    "aten.convolution_backward(f32[4, 8, 5, 5], f32[4, 6, 5, 5], f32[8, 6, 3, 3], [8], [1, 1], [1, 1], [1, 1], False, "
    "[0, 0], 1, [True, True, True])",
    "aten.max_pool2d_with_indices(f32[4, 6, 8, 8], [2, 2], [2, 2])",
    "aten._adaptive_avg_pool2d(f32[4, 6, 8, 8], [4, 4])",
    "aten.upsample_nearest2d(f32[4, 6, 8, 8], [16, 16])",
    "aten.fractional_max_pool2d(f32[4, 6, 8, 8], [2, 2], [4, 4], f32[4, 6, 2])",
    "aten.grid_sampler_2d(f32[4, 6, 8, 8], f32[4, 10, 12, 2], 0, 0, False)",
    "aten.grid_sampler_2d_backward(f32[4, 6, 10, 12], f32[4, 6, 8, 8], f32[4, 10, 12, 2], 0, 0, False, [True, True])",
    # Losses
    "aten.nll_loss_forward(f32[4, 6], i64[4], None, 2, -100)",
    "aten.nll_loss_backward(f32[], f32[4, 6], i64[4], None, 1, -100, f32[])",
    "spmd_losses.ctc_loss(f32[8, 4, 6], i64[4, 3], i64[4], i64[4], 0, False)",
    "spmd_losses.ctc_loss_backward(f32[4], f32[8, 4, 6], i64[4, 3], i64[4], i64[4], f32[4], f32[4, 8, 7], 0, False)",
)
