/* S and W of several small layers in one call from Python: a call for each takes longer than its
   work. The kernels are those that other calls use, so the numbers are the same. */

/* `tensors` has two addresses for each layer: delta, and its input. S and W have room for all
   parameters: `weight` and `bias` say where those of a layer begin. */
void NAME(many_layers)(int64_t layers, const LayerTask *t, const REAL *const *tensors, REAL *S,
                       REAL *W, REAL *scratch, int threads) {
    for (int64_t k = 0; k < layers; k++, t++) {
        const REAL *delta = tensors[2 * k], *a = tensors[2 * k + 1];
        const int64_t b = t->batch, o = t->o, line = t->r * o;
        const int n = t->uses_threads ? threads : 1, has_bias = t->bias >= 0;
        REAL *room = scratch + 2 * b * o;
        if (t->kind == LAYER_DENSE) {
            NAME(outer_of)(delta, a, S + t->weight, 0, W + t->weight, has_bias ? scratch : 0, room,
                           0, b, t->groups, t->r, o, t->i, t->at_once, n);
            if (has_bias) {
                memcpy(S + t->bias, scratch, o * sizeof(REAL));
                memcpy(W + t->bias, scratch + o, o * sizeof(REAL));
            }
            continue;
        }
        if (t->kind == LAYER_NORM) {
            NAME(norm_rows)(a, delta, scratch, scratch + b * o, b, t->r, o, line, o, line, o,
                            t->centre, t->eps, n);
            delta = scratch;
        }
        NAME(sums)(delta, S + t->weight, W + t->weight, b, t->groups, o, o, n);
        if (has_bias)
            NAME(sums)(scratch + b * o, S + t->bias, W + t->bias, b, t->groups, o, o, n);
    }
}
