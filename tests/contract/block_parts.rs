//! Blocks and stacks taken apart, changed and put together again; one block that decodes by itself.

use crate::common::blocks::{Form, MEMORY_WIDTH, Recipe, block, numbers};
use multihead::block::Call;

#[test]
fn a_memory_that_does_not_fit_is_refused_before_it_is_cached() {
    let (block, memory) = (block(Recipe::new(Form::Pre, true), 1), numbers(8, (2, 4, MEMORY_WIDTH)));
    let mut cache = block.cache(2, 6).unwrap();
    let refused = |call: &Call<'_, f64>, cache: &mut _| block.cache_memory(call, cache).unwrap_err().to_string();
    assert_eq!(refused(&Call::new(), &mut cache), "memory: expected what cross-attention reads, got none");
    let wide = numbers(8, (2, 4, MEMORY_WIDTH + 1));
    assert!(refused(&Call::new().memory(&wide), &mut cache).starts_with("key: expected [batch, kv_len, k_dim]"));
    // Numbers to add that cannot be added came through to ndarray, which panics.
    for shape in [(2, 3, MEMORY_WIDTH), (1, 4, MEMORY_WIDTH), (2, 4, MEMORY_WIDTH + 1)] {
        let places = numbers(9, shape);
        let call = Call::new().memory(&memory).memory_positions(&places);
        let text = refused(&call, &mut cache);
        assert!(text.starts_with("memory_positions: expected [batch, len, d_model] = [2, 4, 5]"), "{text}");
    }
    assert!(cache.memory.is_none());
}
